"""The last line of a failed server's log says why it failed."""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterable
from multiprocessing import resource_tracker
from typing import Any

# A name below `vllm`, because that logger has vLLM's handler and level.
logger = logging.getLogger("vllm.dllm")

# Seconds that other processes may take to write their own last lines. A worker whose engine was
# killed needs more than three to end where each core has several processes to run.
OTHERS_SECONDS = 6.0


def describe_end(process: multiprocessing.Process) -> str:
    """How a process ended, in words: with an exit status, or killed by a signal."""
    code, subject = process.exitcode, f"process {process.name} (pid {process.pid})"
    if code is None or code >= 0:
        return f"{subject} ended with exit status {code}; its own error is above"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else "unknown"
    return f"{subject} was killed by signal {-code} ({name})"


def describe_killed(workers: Iterable[Any]) -> str | None:
    """Which of vLLM's handles of worker processes is of one that was killed, in words; or None."""
    for worker in workers:
        process = getattr(worker, "proc", None)
        if process is not None and (process.exitcode or 0) < 0:
            return describe_end(process)
    return None


def fail_with_last_line(cause: str, started: bool = True) -> None:
    """See that this process ends with exit status 1, with the cause in the last line that it says.

    It is a line of the log, or one on stderr where the server could not start: that is what a
    person reads who has typed a command.

    More lines are written at the interpreter's exit, such as those about leaked semaphores and
    about reference counts of bindings. So the line is written after them.

    In a child process it is written at once: such a process runs no exit functions, and the last
    line is its parent's.

    Args:
        cause: why the server fails, without a stop at its end.
        started: the server had started before.
    """
    if multiprocessing.parent_process() is None:
        atexit.register(_write_last_line, cause, started)
    else:
        logger.critical("dllm: %s", cause)


def _write_last_line(cause: str, started: bool) -> None:
    atexit.unregister(_write_last_line)
    with contextlib.suppress(Exception):
        # The exit functions of others, which end processes and remove files. This function runs
        # first, because it was registered last, and does not return.
        atexit._run_exitfuncs()
    with contextlib.suppress(Exception):
        # The process of the resource tracker ends, and says what was leaked, once all processes
        # that might have leaked something have ended.
        tracker: Any = resource_tracker._resource_tracker  # type: ignore[attr-defined]
        stopping = threading.Thread(target=tracker._stop, daemon=True)
        stopping.start()
        stopping.join(OTHERS_SECONDS)
    if started:
        logger.critical("dllm: %s; the server ends with exit status 1", cause)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    if not started:
        with contextlib.suppress(OSError):
            # Not through `sys.stderr`, where vLLM begins each line with the process's name.
            os.write(2, f"vllm-dllm: the server cannot start: {cause}\n".encode())
    os._exit(1)  # the interpreter's own end would write more lines
