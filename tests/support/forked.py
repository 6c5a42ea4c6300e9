"""Processes that are forked from one that has imported vLLM, which takes as long as most tests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


class Forked:
    """What tests need of `subprocess.Popen`, for ``vllm`` and ``python -m`` in a fork."""

    parent: subprocess.Popen[str] | None = None

    def __init__(
        self,
        command: list[str],
        environment: dict[str, str],
        out: Path,
        errors: Path | None = None,
        given: Path = Path(os.devnull),
    ) -> None:
        """Start; its output, and its `errors` if they are not to go there, are written to files."""
        self.returncode: int | None = None
        files = [str(given), str(out), str(errors or out)]
        self.pid: int = self._ask(command=command, environment=environment, files=files)

    @classmethod
    def _ask(cls, **request: Any) -> Any:
        if cls.parent is None:
            cls.parent = subprocess.Popen(
                [sys.executable, "-m", "tests.support.children.warm_parent"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=Path(__file__).resolve().parents[2],
                env=os.environ | ENVIRONMENT,
            )
        assert cls.parent.stdin is not None and cls.parent.stdout is not None
        print(json.dumps(request), file=cls.parent.stdin, flush=True)
        for line in cls.parent.stdout:
            with contextlib.suppress(json.JSONDecodeError):  # what an import prints
                return json.loads(line)
        raise RuntimeError("the process that forks others has ended")

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._ask(poll=self.pid)
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a forked process", timeout)
            time.sleep(0.05)
        assert self.returncode is not None
        return self.returncode


def forked(command: list[str], given: str = "") -> subprocess.CompletedProcess[str]:
    """A command to its end, with what it printed."""
    with tempfile.TemporaryDirectory() as folder:
        asked, out, errors = (Path(folder) / name for name in ("in", "out", "errors"))
        asked.write_text(given)
        process = Forked(command, dict(os.environ), out, errors, asked)
        try:
            status = process.wait(1800)
        except BaseException:  # as `subprocess.run` does, and with the workers of an engine
            os.killpg(process.pid, signal.SIGKILL)
            raise
        return subprocess.CompletedProcess(command, status, out.read_text(), errors.read_text())
