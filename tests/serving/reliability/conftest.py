"""The families' checkpoints, made once, and their engines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.drive import Family, gemma, llada2
from tests.support.engine import Engine


@pytest.fixture(scope="session")
def gemma_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reliability") / "gemma"


@pytest.fixture(scope="module", params=["llada2", pytest.param("gemma", marks=pytest.mark.long)])
def family(request: pytest.FixtureRequest, gemma_path: Path) -> Family:
    return llada2() if request.param == "llada2" else gemma(gemma_path)


@pytest.fixture(scope="module")
def running(family: Family) -> Iterator[Engine]:
    with family.start() as started:
        yield started
