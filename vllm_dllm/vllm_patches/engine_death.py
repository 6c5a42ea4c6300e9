"""The cause of an engine's death, which it tells its front ends and which ends the log.

vLLM's engine tells its front ends only that it died. The reason is somewhere in the log, among what
all other processes write when they end.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from vllm_dllm.vllm_patches.failed_starts import apply_to_launcher
from vllm_dllm.vllm_patches.last_words import describe_end, describe_killed, fail_with_last_line
from vllm_dllm.vllm_patches.wrapping import wrap

# The call id of a message with the reason. vLLM's engine sends the results of calls in such
# messages, under the ids of the calls; no call has this one.
CAUSE_OF_DEATH = -7_315_104
# The message of an exception may be pages long; a line of the log should not.
MOST_CHARACTERS = 500

_causes: list[str] = []


def apply() -> None:
    """Let an engine of ours tell why it dies, and its front ends hear it.

    vLLM's engine is looked up, not imported: it is large, and not every process needs it. An
    engine's process has imported it when it loads plugins. A front end's process may not have
    imported it then, so this is called again when the front end is made.
    """
    core = sys.modules.get("vllm.v1.engine.core")
    if core is None:
        return
    wrap(core.EngineCoreProc, "_send_engine_dead", _send_cause_first)
    wrap(core.EngineCore, "shutdown", _end_all_nodes)
    client = sys.modules.get("vllm.v1.engine.core_client")
    if client is not None:
        # Only here, because it imports this module.
        from vllm_dllm.vllm_patches import engines_elsewhere

        wrap(client, "_process_utility_output", _hear_cause)
        apply_to_launcher(client)
        engines_elsewhere.apply_to_client(client.MPClient)


def apply_to_parent_of_api_servers(parent: ModuleType) -> None:
    """Let the parent of several API servers say why an engine died, too.

    Args:
        parent: vLLM's module that waits for the API servers.
    """
    # Only here, because it imports this module.
    from vllm_dllm.vllm_patches import engines_elsewhere

    wrap(parent, "wait_for_completion_or_failure", _say_which_process_died)
    engines_elsewhere.apply_to_headless_node(parent.CoreEngineProcManager)
    apply_to_launcher(parent)


def note_cause(cause: str) -> None:
    """Keep why an engine died; the first cause is what the server's last line says."""
    _causes.append(cause)


def first_dead(manager: Any) -> multiprocessing.Process | None:
    """The process that died first and by itself, of those of vLLM's manager of engines."""
    name = getattr(manager, "failed_proc_name", None)
    processes: Iterable[multiprocessing.Process] = getattr(manager, "processes", ())
    return next((process for process in processes if process.name == name), None)


def cause_of_death(manager: Any) -> str:
    """Why a server's engine died, in one line.

    An engine that is killed says nothing, but other ranks, which then fail, do.

    Args:
        manager: of vLLM, which has the processes of the engines of this node; or None.
    """
    first = first_dead(manager)
    if first is not None and (first.exitcode or 0) < 0:
        return f"the engine died: {describe_end(first)}"
    if _causes:
        return f"the engine died: {_causes[0]}"
    for process in getattr(manager, "processes", ()):
        if process.exitcode:
            return f"the engine died: {describe_end(process)}"
    return "the front end could not go on; see its error above"


def engine_ended_well(processes: Iterable[multiprocessing.Process]) -> bool:
    """Whether an engine was asked to end before its front end was.

    That is so where a signal was sent to all processes of a server.
    """
    exit_codes = [process.exitcode for process in processes]
    return bool(exit_codes) and not _causes and all(code == 0 for code in exit_codes)


def _send_cause_first(original: Callable[..., None]) -> Callable[..., None]:
    def send_engine_dead(self: Any) -> None:
        if hasattr(self.vllm_config.model_config, "dllm"):
            _send_cause(self)
        original(self)

    return send_engine_dead


def _end_all_nodes(original: Callable[..., None]) -> Callable[..., None]:
    """An engine that shuts down without having told a cause was asked to."""

    def shutdown(self: Any) -> None:
        lines = getattr(getattr(self, "model_executor", None), "dllm_lifelines", None)
        if lines is not None:
            lines.end(None)
        original(self)

    return shutdown


def _send_cause(core: Any) -> None:
    """Tell the front ends which exception ends this engine. Runs in the engine's process.

    Args:
        core: vLLM's ``EngineCoreProc``, in the handler of that exception.
    """
    from vllm.v1.engine import EngineCoreOutputs, UtilityOutput

    error = sys.exc_info()[1]
    if error is None:
        return
    text = str(error).strip()
    cause = f"{type(error).__name__}: {text.splitlines()[0][:MOST_CHARACTERS] if text else ''}"
    executor = getattr(core, "model_executor", None)
    killed = describe_killed(getattr(executor, "workers", None) or ())
    lines = getattr(executor, "dllm_lifelines", None)
    if killed is None and lines is not None:
        # A broken collective operation may be reported before the broken connection is.
        killed = lines.lost(seconds=1)
    if killed is not None:
        cause = killed if killed in cause else f"{killed} ({cause})"
    name = multiprocessing.current_process().name
    if "_DP" in name:  # one of several ranks
        cause = f"process {name} (pid {os.getpid()}): {cause}"
    if lines is not None:
        lines.end(cause)
    output = UtilityOutput(CAUSE_OF_DEATH, failure_message=cause)
    core.output_queue.put_nowait((0, EngineCoreOutputs(utility_output=output)))


def _hear_cause(original: Callable[..., None]) -> Callable[..., None]:
    def process_utility_output(output: Any, *args: Any) -> None:
        if output.call_id == CAUSE_OF_DEATH:
            note_cause(output.failure_message)
        else:
            original(output, *args)

    return process_utility_output


def _say_which_process_died(original: Callable[..., None]) -> Callable[..., None]:
    def wait_for_completion_or_failure(
        api_server_manager: Any, engine_manager: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        try:
            original(api_server_manager, engine_manager, *args, **kwargs)
        except Exception as error:
            dead = any(p.exitcode for p in getattr(engine_manager, "processes", ()))
            fail_with_last_line(cause_of_death(engine_manager) if dead else str(error))
            raise

    return wait_for_completion_or_failure
