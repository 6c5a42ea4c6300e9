"""Why an engine died, told by it to its front end, and said in the last line of the log."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from multiprocessing import resource_tracker
from typing import Any

from vllm.logger import init_logger
from vllm.v1.engine import EngineCoreOutputs, UtilityOutput

logger = init_logger("vllm.dllm")

# An answer to no call, among those of vLLM's engine: why it is about to die.
DEATH = -7_315_104
# A message of an exception may be a page long, a line of a log should not.
MOST_CHARACTERS = 500
# For other processes to write their own last lines.
OTHERS_SECONDS = 3.0

_heard: list[str] = []


def tell(core: Any) -> None:
    """Tell the front ends which exception ends this engine. In the engine's process.

    Args:
        core: vLLM's ``EngineCoreProc``, in the handler of that exception.
    """
    error = sys.exc_info()[1]
    if error is None:
        return
    text = str(error).strip()
    cause = f"{type(error).__name__}: {text.splitlines()[0][:MOST_CHARACTERS] if text else ''}"
    for worker in getattr(getattr(core, "model_executor", None), "workers", None) or ():
        process = getattr(worker, "proc", None)
        if process is not None and (process.exitcode or 0) < 0:
            cause = f"{_end_of(process)} ({cause})"
            break
    message = EngineCoreOutputs(utility_output=UtilityOutput(DEATH, failure_message=cause))
    core.output_queue.put_nowait((0, message))


def telling(original: Callable[..., None]) -> Callable[..., None]:
    """``EngineCoreProc._send_engine_dead``, with the cause where the model is ours."""

    def send(self: Any) -> None:
        if hasattr(self.vllm_config.model_config, "dllm"):
            tell(self)
        original(self)

    return send


def listen(original: Callable[..., None]) -> Callable[..., None]:
    """The front end's side of `tell`."""

    def process(output: Any, *rest: Any) -> None:
        if output.call_id == DEATH:
            _heard.append(output.failure_message)
        else:
            original(output, *rest)

    return process


def cause_of_death(processes: Iterable[multiprocessing.Process]) -> str:
    """In a line; `processes` are the engines'."""
    if _heard:
        return f"the engine died: {_heard[0]}"
    for process in processes:
        if process.exitcode:
            return f"the engine died: {_end_of(process)}"
    return "the front end could not go on; see its error above"


def _end_of(process: multiprocessing.Process) -> str:
    code, who = process.exitcode, f"process {process.name} (pid {process.pid})"
    if code is None or code >= 0:
        return f"{who} ended with exit status {code}; its own error is above"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else "unknown"
    return f"{who} was killed by signal {-code} ({name})"


def speak_last(cause: str) -> None:
    """End this process with exit status 1, with the cause in the last line of the log.

    What ends at the interpreter's exit writes lines too: leaked semaphores, reference counts of
    bindings. So the line is written behind them.
    """
    if multiprocessing.parent_process() is None:
        atexit.register(_last_words, cause)
    else:  # such a process runs no exit functions, and its parent has the last word
        logger.critical("dllm: %s", cause)


def name_the_dead(original: Callable[..., None]) -> Callable[..., None]:
    """``wait_for_completion_or_failure``, in the parent of several API servers."""

    def wait(api_server_manager: Any, engine_manager: Any = None, *rest: Any, **named: Any) -> None:
        try:
            original(api_server_manager, engine_manager, *rest, **named)
        except Exception as error:
            dead = [p for p in getattr(engine_manager, "processes", ()) if p.exitcode]
            speak_last(cause_of_death(dead) if dead else str(error))
            raise

    return wait


def _last_words(cause: str) -> None:
    atexit.unregister(_last_words)
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()  # those of others, which end processes and remove files
    with contextlib.suppress(Exception):
        # Its process ends, and says what was leaked, when all who might leak have ended.
        tracker: Any = resource_tracker._resource_tracker  # type: ignore[attr-defined]
        waiting = threading.Thread(target=tracker._stop, daemon=True)
        waiting.start()
        waiting.join(OTHERS_SECONDS)
    logger.critical("dllm: %s; the server ends with exit status 1", cause)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(1)  # the interpreter's own end would write more lines
