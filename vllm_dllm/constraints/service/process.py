"""A process that compiles constraints, as seen by the process that asks it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from vllm_dllm.constraints.service.protocol import HEADER, frame

# The directory that holds the package `vllm_dllm`, which the process must be able to import.
IMPORT_PATH = Path(__file__).resolve().parents[3]
WORKER_MODULE = "vllm_dllm.constraints.service.worker"
START_SECONDS = 60.0


class ProcessLostError(Exception):
    """The process is gone."""


class AnswerLateError(Exception):
    """The process has not answered in time."""


class WorkerProcess:
    """A running `service.worker`. It answers one message at a time and ends when its parent does.

    It runs in a session of its own, for two reasons. Linux divides CPU time between sessions first
    ("autogroups"), so a compilation gets its share however many processes are busy in the server's
    session. And signals that a terminal sends to the server's processes do not reach it.

    Raises:
        ProcessLostError: it does not start.
    """

    def __init__(self, greeting: bytes) -> None:
        paths = [str(IMPORT_PATH), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.process = subprocess.Popen(
            [sys.executable, "-m", WORKER_MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
            | dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
        )
        try:
            self.ask(greeting, START_SECONDS)
        except (ProcessLostError, AnswerLateError) as error:
            self.stop()
            raise ProcessLostError("the process that compiles constraints did not start") from error

    def ask(self, payload: bytes, seconds: float) -> bytes:
        """Send a message and return the answer.

        Raises:
            AnswerLateError: there is no answer within that many seconds of wall time.
            ProcessLostError: the process is gone.
        """
        stdin, stdout = self.process.stdin, self.process.stdout
        if stdin is None or stdout is None:
            raise TypeError("the process has no pipes")
        until = time.monotonic() + seconds
        try:
            stdin.write(frame(payload))
            stdin.flush()
            (size,) = HEADER.unpack(_read(stdout.fileno(), HEADER.size, until))
            return _read(stdout.fileno(), size, until)
        except (OSError, ValueError) as error:
            raise ProcessLostError("the process that compiles constraints is gone") from error

    def kill(self) -> None:
        """Kill it and its fork at once. A call of `ask` that is waiting raises an error."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def stop(self) -> None:
        """Kill it, close its pipes and wait for it. Only for the thread that calls `ask`."""
        self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                # Flushing what was not sent fails; nobody needs it any more.
                with contextlib.suppress(OSError):
                    stream.close()
        self.process.wait()


def _read(descriptor: int, size: int, until: float) -> bytes:
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    pieces, missing = [], size
    while missing:
        if not waiting.poll(max(until - time.monotonic(), 0) * 1000):
            raise AnswerLateError
        piece = os.read(descriptor, min(missing, 1 << 20))
        if not piece:
            raise ProcessLostError
        pieces.append(piece)
        missing -= len(piece)
    return b"".join(pieces)
