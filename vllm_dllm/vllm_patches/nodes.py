"""An engine on several nodes ends as one on a single node does: all of it, soon, with a reason.

vLLM watches the worker processes of its own node only. When another node dies, nothing happens
until a request waits for it, for five minutes; when the first node ends, the others never do.
Here each worker of another node holds a connection to the engine (`lifelines`), and each node
ends when its connection says so. This module has the first node's part, `other_nodes` the rest.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from vllm_dllm.vllm_patches.last_words import describe_killed
from vllm_dllm.vllm_patches.lifelines import Lifelines
from vllm_dllm.vllm_patches.other_nodes import (
    be_interruptible,
    end_with_first_node,
    fail_unless_asked,
    hold_in_worker,
    interruptible,
    node_of,
    settings_of,
)
from vllm_dllm.vllm_patches.wrapping import wrap

logger = logging.getLogger("vllm.dllm")

# Seconds after which an engine that has lost its server is no longer waited for.
FAIL_SECONDS = 20.0


def apply() -> None:
    """Wrap vLLM's executor where it has been imported: in engines, and on nodes without one."""
    module = sys.modules.get("vllm.v1.executor.multiproc_executor")
    if module is None:
        return
    wrap(module.MultiprocExecutor, "_init_executor", _connect_nodes)
    wrap(module.MultiprocExecutor, "shutdown", _tell_nodes)
    wrap(module.MultiprocExecutor, "start_worker_monitor", end_with_first_node)
    wrap(module.WorkerProc, "monitor_death_pipe", be_interruptible)
    wrap(module.WorkerProc, "shutdown", fail_unless_asked)


def _connect_nodes(original: Callable[..., None]) -> Callable[..., None]:
    def init_executor(self: Any) -> None:
        original(self)
        if node_of(self.vllm_config) != 0:
            return
        from vllm.utils.network_utils import get_ip

        lines = Lifelines(get_ip())
        for queue in self.response_mqs:
            interruptible(queue, lines.lost)
        settings = self.collective_rpc(hold_in_worker, args=(lines.address,))
        lines.accept(range(self.local_world_size, self.world_size))
        try:
            _compare(settings_of(self.vllm_config), settings)
        except ValueError as error:
            lines.end(str(error))
            raise
        self.dllm_lifelines = lines
        lines.watch(lambda: _fail(self))
        _watch_server(lines, lambda: _fail(self))

    return init_executor


def _watch_server(lines: Lifelines, on_loss: Callable[[], None]) -> None:
    """Fail when the process that started the engine dies: a supervisor sees no other."""
    server = multiprocessing.parent_process()
    if server is None:
        return  # the engine is within the process that uses it

    def wait() -> None:
        server.join()
        if lines.lose(f"the server (pid {server.pid}) died"):
            on_loss()
            time.sleep(FAIL_SECONDS)
            os._exit(1)

    threading.Thread(target=wait, daemon=True, name="DllmServerMonitor").start()


def _compare(ours: dict[str, Any], by_rank: list[dict[str, Any]]) -> None:
    for rank, theirs in enumerate(by_rank):
        for flag, value in ours.items():
            if theirs[flag] != value:
                raise ValueError(
                    f"rank {rank} is on a node with another {flag} than the first node; "
                    "start all nodes with the same"
                )


def _fail(executor: Any) -> None:
    """Do what vLLM does when a worker of this node dies. The engine itself shuts the executor down.

    Runs in a thread of its own. The engine's main thread may wait for an answer of the dead.
    """
    logger.error("dllm: %s", executor.dllm_lifelines.lost())
    executor.is_failed = True
    for queue in list(executor.response_mqs):
        queue.shutdown()
    callback, executor.failure_callback = executor.failure_callback, None
    if callback is not None:
        callback()


def _tell_nodes(original: Callable[..., None]) -> Callable[..., None]:
    """Tell other nodes why, unless the engine has done so already: see `engine_death`."""

    def shutdown(self: Any) -> None:
        lines = getattr(self, "dllm_lifelines", None)
        if lines is not None:
            cause = describe_killed(getattr(self, "workers", None) or ())
            lines.end(cause or lines.lost() or "its executor was shut down")
        original(self)

    return shutdown
