"""Answers of these tests are kept apart from the user's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="package", autouse=True)
def kept_answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Answers of these tests are kept apart from the user's; vLLM's own cache stays."""
    before = os.environ.get("XDG_CACHE_HOME")
    place = tmp_path_factory.mktemp("cache")
    home = Path(before or Path.home() / ".cache")
    (place / "vllm").mkdir()
    if (home / "vllm" / "modelinfos").is_dir():
        (place / "vllm" / "modelinfos").symlink_to(home / "vllm" / "modelinfos")
    os.environ["XDG_CACHE_HOME"] = str(place)
    yield place / "vllm" / "dllm" / "answers"
    os.environ.pop("XDG_CACHE_HOME")
    if before is not None:
        os.environ["XDG_CACHE_HOME"] = before
