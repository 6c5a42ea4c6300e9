"""A process that compiles constraints, as the process that asks it sees it."""

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

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 60.0


class LostError(Exception):
    """The process is gone."""


class LateError(Exception):
    """The process has not answered in time."""


class Process:
    """See `child`; one question at a time. It ends when the process that asks does.

    It has a session of its own. Linux divides CPU time between sessions first ("autogroups"), so
    what is compiled gets its share however many processes are busy in the server's session; and
    what a terminal sends to the server's processes does not reach it.

    Raises:
        LostError: it does not start.
    """

    def __init__(self, greeting: bytes) -> None:
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "vllm_dllm.constraints.service.worker"],
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
        except (LostError, LateError) as error:
            self.stop()
            raise LostError("the process that compiles constraints did not start") from error

    def ask(self, payload: bytes, seconds: float) -> bytes:
        """The answer to a message.

        Raises:
            LateError: there is none within so many seconds of wall time.
            LostError: the process is gone.
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
            raise LostError("the process that compiles constraints is gone") from error

    def kill(self) -> None:
        """End it and its worker, whatever they do; whoever waits for an answer hears of it."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def stop(self) -> None:
        """As `kill`, and tidy up; only for the thread that asks."""
        self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                # What could not be written is of no use any more.
                with contextlib.suppress(OSError):
                    stream.close()
        self.process.wait()


def _read(descriptor: int, size: int, until: float) -> bytes:
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    pieces, missing = [], size
    while missing:
        if not waiting.poll(max(until - time.monotonic(), 0) * 1000):
            raise LateError
        piece = os.read(descriptor, min(missing, 1 << 20))
        if not piece:
            raise LostError
        pieces.append(piece)
        missing -= len(piece)
    return b"".join(pieces)
