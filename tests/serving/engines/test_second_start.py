"""A second start loads what the first one compiled, and gives the same tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkpoints import ROOT

pytestmark = [pytest.mark.engine, pytest.mark.long]


def start(model: str, folder: Path) -> tuple[str, str]:
    """What an engine answers, and its log."""
    caches = {"VLLM_CACHE_ROOT": folder / "vllm", "TORCHINDUCTOR_CACHE_DIR": folder / "torch"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.children.start_child", json.dumps(model)],
        cwd=ROOT,
        env=os.environ | {"HF_HUB_OFFLINE": "1"} | {k: str(v) for k, v in caches.items()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    log = done.stdout + done.stderr
    return next(line for line in done.stdout.splitlines() if line.startswith("[[")), log


@pytest.mark.parametrize("model", ["tiny-llada2", "tiny-diffusiongemma", "tiny-sdar"])
def test_a_second_start_compiles_nothing(model: str, tmp_path: Path) -> None:
    """vLLM's loader failed on the CPU, and each start compiled the backbone anew."""
    answers, log = start(model, tmp_path)
    assert "saved AOT compiled function" in log
    again, log = start(model, tmp_path)
    assert "Directly load AOT compilation" in log
    assert "Compiling model again" not in log and "saved AOT compiled function" not in log
    assert again == answers
