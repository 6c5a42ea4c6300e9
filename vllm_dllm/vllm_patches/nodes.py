"""An engine on several nodes ends as one on a single node does: all of it, soon, with a reason.

vLLM watches the worker processes of its own node only. When another node dies, nothing happens
until a request waits for it, for five minutes; when the first node ends, the others never do.
Here each worker of another node holds a connection to the engine (`lifelines`), and each node
ends when its connection says so.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import connection
from typing import Any

from vllm_dllm.vllm_patches.failed_starts import REPORT
from vllm_dllm.vllm_patches.last_words import describe_end, describe_killed, fail_with_last_line
from vllm_dllm.vllm_patches.lifelines import Lifelines, hold
from vllm_dllm.vllm_patches.registration import is_ours
from vllm_dllm.vllm_patches.wrapping import wrap

logger = logging.getLogger("vllm.dllm")

# A reader over the network looks so often, in seconds, whether its queue was shut down.
LOOK_SECONDS = 0.2
# Seconds that a worker may take to free its device once its engine has ended.
END_SECONDS = 10.0
# Seconds after which an engine that has lost its server is no longer waited for.
FAIL_SECONDS = 20.0
# The exit status of a worker that has lost its engine.
LOST_ENGINE = 70

# In a worker of another node: what ends its main thread.
_worker: _Ending | None = None


def apply() -> None:
    """Wrap vLLM's executor where it has been imported: in engines, and on nodes without one."""
    module = sys.modules.get("vllm.v1.executor.multiproc_executor")
    if module is None:
        return
    wrap(module.MultiprocExecutor, "_init_executor", _connect_nodes)
    wrap(module.MultiprocExecutor, "shutdown", _tell_nodes)
    wrap(module.MultiprocExecutor, "start_worker_monitor", _end_with_first_node)
    wrap(module.WorkerProc, "monitor_death_pipe", _be_interruptible)
    wrap(module.WorkerProc, "shutdown", _fail_unless_asked)


def _node_of(vllm_config: Any) -> int | None:
    """The number of this node within an engine of ours; None if the engine has no other."""
    parallel = vllm_config.parallel_config
    if not is_ours(vllm_config.model_config) or parallel.nnodes_within_dp == 1:
        return None
    return parallel.node_rank_within_dp


def _interruptible(queue: Any, reason: Callable[[], str | None] = lambda: None) -> None:
    """Let a reader over the network stop when its queue is shut down, as other readers do.

    Args:
        queue: a ``MessageQueue``; one that is not read over the network stays as it is.
        reason: what the error says, if it is known.
    """
    original = queue.dequeue

    def dequeue(timeout: float | None = None, indefinite: bool = False) -> Any:
        deadline = None if timeout is None else time.monotonic() + timeout
        while not queue.shutting_down:
            left = LOOK_SECONDS if deadline is None else deadline - time.monotonic()
            try:
                return original(max(min(left, LOOK_SECONDS), 0))
            except TimeoutError:
                if deadline is not None and time.monotonic() >= deadline:
                    raise
        raise RuntimeError(reason() or "cancelled")

    if queue._is_remote_reader:
        queue.dequeue = dequeue


# ---- on the first node, in the engine's process


def _connect_nodes(original: Callable[..., None]) -> Callable[..., None]:
    def init_executor(self: Any) -> None:
        original(self)
        if _node_of(self.vllm_config) != 0:
            return
        from vllm.utils.network_utils import get_ip

        lines = Lifelines(get_ip())
        for queue in self.response_mqs:
            _interruptible(queue, lines.lost)
        settings = self.collective_rpc(_hold_in_worker, args=(lines.address,))
        lines.accept(range(self.local_world_size, self.world_size))
        try:
            _compare(_settings(self.vllm_config), settings)
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


def _settings(vllm_config: Any) -> dict[str, Any]:
    """What all nodes must be started with alike, by flag: each rank decodes by its own."""
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    return {
        "--additional-config, --diffusion-config or the checkpoint": model.dllm,
        "--dtype": str(model.dtype),
        "--max-num-seqs": scheduler.max_num_seqs,
        "--max-num-batched-tokens": scheduler.max_num_batched_tokens,
        "--async-scheduling": scheduler.async_scheduling,
    }


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


# ---- on other nodes, in their workers


class _Ending:
    """How the main thread of a worker comes to its end.

    Attributes:
        asked: the engine was asked to end, and this worker with it.
    """

    def __init__(self, worker: Any, shutdown_requested: threading.Event) -> None:
        self.asked = False
        self._queue = worker.rpc_broadcast_mq
        self._shutdown_requested = shutdown_requested
        _interruptible(self._queue)

    def end(self, cause: str | None) -> None:
        """End this process. Runs in a thread of its own."""
        if cause is None:
            self.asked = True
            self._shutdown_requested.set()
            self._queue.shutdown()
            threading.main_thread().join(END_SECONDS)
            os._exit(0)
        logger.error("dllm: %s", cause)
        with contextlib.suppress(OSError, KeyError), open(_file_of_cause(), "x") as file:
            file.write(cause)
        # The main thread may be in a collective operation with the dead, which nothing ends.
        os._exit(LOST_ENGINE)


def _file_of_cause() -> str:
    return os.environ[REPORT] + ".lost"


def _be_interruptible(original: Callable[..., None]) -> Callable[..., None]:
    def monitor_death_pipe(self: Any, death_pipe: Any, shutdown_requested: Any) -> None:
        global _worker
        if _node_of(self.worker.vllm_config):
            _worker = _Ending(self, shutdown_requested)
        original(self, death_pipe, shutdown_requested)

    return monitor_death_pipe


def _hold_in_worker(worker: Any, address: tuple[str, int, str]) -> dict[str, Any]:
    """Connect this worker to the engine, if it is on another node. Called by the executor.

    Returns:
        the settings that this worker was started with.
    """
    node = _node_of(worker.vllm_config)
    if node and _worker is not None:
        hold(address, worker.global_rank, node, _worker.end)
    return _settings(worker.vllm_config)


def _fail_unless_asked(original: Callable[..., None]) -> Callable[..., None]:
    def shutdown(self: Any) -> None:
        original(self)
        if _worker is not None and not _worker.asked:
            raise SystemExit(1)  # vLLM's workers end with 0 after an exception

    return shutdown


# ---- on other nodes, in the process that started the workers


def _end_with_first_node(original: Callable[..., None]) -> Callable[..., None]:
    def start_worker_monitor(self: Any, inline: bool = False) -> None:
        if not inline or _node_of(self.vllm_config) is None:
            original(self, inline)
            return
        ends = _WhenAsked(self)
        processes = {worker.proc.sentinel: worker.proc for worker in self.workers}
        dead = processes[connection.wait(processes)[0]]  # type: ignore[index]
        dead.join(END_SECONDS)
        if dead.exitcode == 0 or ends.at_once:
            self.shutdown()
            return
        cause = describe_end(dead)
        with contextlib.suppress(OSError, KeyError), open(_file_of_cause()) as file:
            cause = file.read()
        original(self, inline)
        fail_with_last_line(cause)
        raise SystemExit(1)

    return start_worker_monitor


class _WhenAsked:
    """What a node without a server does when a signal asks it to end.

    Supervisors ask all nodes at the same time, and the first one still answers its requests. So
    this one goes on for as long as these may take. A second signal ends it at once.

    Attributes:
        at_once: it does not wait for the first node any more.
    """

    def __init__(self, executor: Any) -> None:
        self.at_once = False
        self._executor = executor
        self._seconds = executor.vllm_config.shutdown_timeout
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._first)

    def _first(self, number: int, frame: Any) -> None:
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, self._second)
        logger.info(
            "dllm: this node ends with the first one, or in %g s; a second signal ends it at once",
            self._seconds,
        )
        timer = threading.Timer(self._seconds, self._end)
        timer.daemon = True
        timer.start()

    def _second(self, number: int, frame: Any) -> None:
        # Not here: a signal may come while a lock is held that the shutdown needs.
        threading.Thread(target=self._end, daemon=True).start()

    def _end(self) -> None:
        self.at_once = True
        self._executor.shutdown()
