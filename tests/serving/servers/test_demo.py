"""The demo as a newcomer runs it, and as somebody who has seen enough stops it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.serving.servers.test_failed_starts import lives

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


def test_prints_an_answer_and_a_summary() -> None:
    process = run_demo()
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert re.search(r"\d+ tokens in \d+ steps?: \d+\.\d\d tokens per step, \d+\.\d\d s", output)
    assert output.rstrip().endswith("server stopped")


def test_ctrl_c_leaves_nothing_running() -> None:
    # So many that it is still at it when the signal comes, however late that is.
    process = run_demo(*("--prompt", "copy abc") * 2000)
    deadline = time.monotonic() + 60
    while not psutil.Process(process.pid).children() and time.monotonic() < deadline:
        time.sleep(0.2)
    time.sleep(2)
    started = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "server stopped" in output
    assert started and not any(lives(each) for each in started)
