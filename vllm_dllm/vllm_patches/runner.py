"""What a model state needs of the process and of the runner that vLLM has made it in.

Called by our model state when the runner makes it. This module is the only one of the package
that the worker imports, so it imports nothing of ours but `wrapping`.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from typing import Any

from vllm_dllm.vllm_patches.wrapping import wrap


def tell_of_preemptions() -> None:
    """Let vLLM's runner tell a model state of ours which requests it preempts.

    The runner calls ``remove_request`` for preempted and for finished requests alike, so before
    them it now calls ``preempt_requests(preempted, finished)`` of a model state that has it.

    The runner's module is looked up, not imported: importing it before vLLM does is not safe (on
    the CPU it must be imported after the kernels were swapped), and a model state exists only
    where the runner has been imported.
    """
    wrap(
        sys.modules["vllm.v1.worker.gpu.model_runner"].GPUModelRunner,
        "finish_requests",
        _name_preempted_requests,
    )


def _name_preempted_requests(original: Callable[..., None]) -> Callable[..., None]:
    def finish_requests(self: Any, scheduler_output: Any) -> None:
        preempt = getattr(self.model_state, "preempt_requests", None)
        if preempt is not None:
            preempt(scheduler_output.preempted_req_ids or (), scheduler_output.finished_req_ids)
        original(self, scheduler_output)

    return finish_requests


def outlive_signals() -> None:
    """Leave it to the engine when its worker processes end.

    Terminals and supervisors send a signal to all processes of a server. vLLM's workers would end
    at once, in the middle of requests that the engine still has to answer. A worker that passes
    over the signal still ends: when its engine closes their pipe, or dies, and an engine that gets
    no reaction kills it.
    """
    handler = signal.getsignal(signal.SIGTERM)
    if "WorkerProc." in getattr(handler, "__qualname__", ""):
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
