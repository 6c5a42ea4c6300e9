"""Run each case in a separate process, so that the others go on whatever happens in one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The lines of a child's log that go into the report: what this package and vLLM say they chose.
TELLING = ("dllm:", "ttention backend", "cudagraph", "CUDA graph", "Graph capturing", "arming up")
LOG_LINES = 40
LINE = 400  # characters; longer lines are dumps of all settings


@dataclass(frozen=True)
class Outcome:
    """How a child ended.

    Attributes:
        answer: what it wrote, or None.
        problem: why it wrote nothing, in one line; empty if it wrote an answer.
        log: the lines of its log that say what was chosen, and the last lines if it failed.
        seconds: how long it took.
    """

    answer: dict[str, Any] | None
    problem: str
    log: tuple[str, ...]
    seconds: float


def run_job(job: dict[str, Any], limit: float) -> Outcome:
    """Run a job of `vllm_dllm.selftest.child` in a separate process.

    Args:
        job: what the child gets.
        limit: seconds after which it is stopped.
    """
    with tempfile.TemporaryDirectory(prefix="vllm-dllm-selftest-") as folder:
        asked, answered = Path(folder, "job.json"), Path(folder, "answer.json")
        asked.write_text(json.dumps(job), "utf-8")
        command = (sys.executable, "-m", "vllm_dllm.selftest.child", str(asked), str(answered))
        status, log, seconds = run(command, limit, environment(job.get("environment", {})))
        if status == 0:
            answer = json.loads(answered.read_text("utf-8"))
            lines = [
                line for line in log if len(line) < LINE and any(word in line for word in TELLING)
            ]
            return Outcome(answer, "", tuple(lines[:LOG_LINES]), seconds)
    return Outcome(None, reason(status, log, limit), tuple(log[-LOG_LINES:]), seconds)


def run(
    command: Sequence[str], limit: float, env: dict[str, str] | None = None
) -> tuple[int | None, list[str], float]:
    """Run a command; return its exit status, the lines of its output, and its seconds.

    The status is None for a command that was stopped at the limit. Processes that it started end
    with it.
    """
    begin = time.perf_counter()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        child = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )
        try:
            status: int | None = child.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        log.seek(0)
        return status, log.read().splitlines(), time.perf_counter() - begin


def reason(status: int | None, log: Sequence[str], limit: float) -> str:
    """Why a child has no answer, in one line."""
    if status is None:
        return f"stopped after {limit:.0f} seconds"
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    errors = [line.strip() for line in log if "Error" in line.split(":")[0]]
    last = errors[-1] if errors else next((line for line in reversed(log) if line.strip()), "")
    return f"exit status {status}: {last[:300]}"


def environment(more: dict[str, str]) -> dict[str, str]:
    """The environment of a child, which imports this same package wherever it is installed."""
    parent = str(Path(__file__).resolve().parents[2])
    paths = [parent, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "NO_COLOR": "1"} | more
