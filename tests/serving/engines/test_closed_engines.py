"""What an engine has started to compile constraints ends with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.long]

ROOT = Path(__file__).resolve().parents[3]
COMPILER = "canvas_grammar.pool_process"


@pytest.fixture(scope="module")
def closed() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.children.closing_child"],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
        env={name: value for name, value in os.environ.items()
             if name != "VLLM_ENABLE_V1_MULTIPROCESSING"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("engine", ["AsyncLLM", "LLM"])
def test_no_process_outlives_its_engine(closed: dict[str, Any], engine: str) -> None:
    before, after = closed[engine]["before"], closed[engine]["after"]
    assert any(COMPILER in command for command in before)
    assert not any(COMPILER in command for command in after)


def test_grammars_are_imported_for_constraints_only(closed: dict[str, Any]) -> None:
    assert "vllm_dllm" in closed["LLM"]["loaded"]
    assert "canvas_grammar" not in closed["LLM"]["loaded"]


@pytest.mark.parametrize("engine", ["AsyncLLM", "LLM"])
def test_constraints_wait_for_their_turn(closed: dict[str, Any], engine: str) -> None:
    """Offline, where nobody could send them again."""
    assert closed[engine]["answers"] == [letter * 3 for letter in "abcdefgh"]
