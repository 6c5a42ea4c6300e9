"""End the workers of an engine that fails to start together with it.

Such an engine leaves its workers to Python's `multiprocessing`, which sends them SIGTERM and then
waits for them without a limit. A worker may miss the signal: its handler raises ``SystemExit``,
which Python drops inside a weak-reference callback, and no handler runs inside a library's function
that does not return. vLLM's own shutdown kills such a worker after 9 s, but is not called
(``docs/upstream/process_supervision.md``).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from multiprocessing import util
from typing import Any

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from vllm_dllm.vllm_seams.registration import is_ours
from vllm_dllm.vllm_seams.wrapping import wrap


def apply() -> None:
    """Shut an executor down before its process waits for its child processes."""
    wrap(MultiprocExecutor, "_init_executor", _shut_down_at_exit)


def _shut_down_at_exit(original: Callable[..., None]) -> Callable[..., None]:
    def init_executor(self: Any) -> None:
        original(self)
        if is_ours(self.vllm_config.model_config):
            util.Finalize(None, _shut_down, (weakref.ref(self),), exitpriority=0)

    return init_executor


def _shut_down(executor: weakref.ref[Any]) -> None:
    running = executor()
    if running is not None:
        running.shutdown()  # has no effect if it was called before
