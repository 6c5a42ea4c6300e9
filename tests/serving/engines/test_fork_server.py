"""Processes of an engine that are forked with vLLM imported run as fresh interpreters do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.support.checkpoints import ROOT

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def run(way: str, bound_to: str) -> Any:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": bound_to}
    environment.pop("OMP_NUM_THREADS", None)
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.children.fork_server_child", way],
        cwd=ROOT,
        env=environment | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[{")))


@pytest.mark.parametrize(
    "bound_to",
    [
        pytest.param("0,1", marks=pytest.mark.long),
        pytest.param("auto", marks=pytest.mark.long),
        pytest.param("nobind", marks=pytest.mark.long),
    ],
)
def test_a_forked_worker_is_bound_as_a_fresh_one(bound_to: str) -> None:
    """Catches OpenMP that was loaded with the settings of another process, and a server that the
    script's own code would use."""
    forked, answer, free = run("forked", bound_to)
    fresh, expected, _ = run("fresh", bound_to)
    assert forked.pop("forked") is True and fresh.pop("forked") is False
    assert forked == fresh and free
    assert answer == expected == "92"
