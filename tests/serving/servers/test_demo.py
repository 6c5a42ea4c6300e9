"""The demo as a newcomer runs it, and as somebody who has seen enough stops it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def run_demo(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "vllm_dllm.cli", "demo", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        # A shell lets what it starts in the background ignore Ctrl-C, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def servers(parent: int) -> list[str]:
    """Command lines of processes that the demo started and that are still there."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_text().replace("\0", " ")
            environment = (entry / "environ").read_text(errors="replace")
        except OSError:
            continue
        if f"DEMO_PARENT={parent}" in environment:
            found.append(command)
    return found


def test_prints_an_answer_and_a_summary() -> None:
    process = run_demo()
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert re.search(r"\d+ tokens in \d+ steps?: \d+\.\d\d tokens per step, \d+\.\d\d s", output)
    assert output.rstrip().endswith("server stopped")


def test_ctrl_c_leaves_nothing_running() -> None:
    os.environ["DEMO_PARENT"] = str(os.getpid())
    try:
        # So many that it is still at it when the signal comes, however late that is.
        process = run_demo(*("--prompt", "copy abc") * 2000)
        deadline = time.monotonic() + 60
        # The test process itself carries no mark: its environment was read when it started.
        while len(servers(os.getpid())) < 2 and time.monotonic() < deadline:
            time.sleep(0.2)
        time.sleep(2)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 130, output
        assert "server stopped" in output
        assert servers(os.getpid()) == []
    finally:
        del os.environ["DEMO_PARENT"]
