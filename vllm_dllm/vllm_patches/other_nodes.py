"""What the nodes of an engine do that have no server: its workers, and the process above them.

See `nodes`, which has the first node's part.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing import connection
from typing import Any

from vllm_dllm.vllm_patches.failed_starts import REPORT
from vllm_dllm.vllm_patches.last_words import describe_end, fail_with_last_line
from vllm_dllm.vllm_patches.lifelines import hold
from vllm_dllm.vllm_patches.registration import is_ours

logger = logging.getLogger("vllm.dllm")

# A reader over the network looks so often, in seconds, whether its queue was shut down.
LOOK_SECONDS = 0.2
# Seconds that a worker may take to free its device once its engine has ended.
END_SECONDS = 10.0
# Seconds within which a worker whose engine was asked to end has heard of it over its lifeline.
ASKED_SECONDS = 0.5
# The exit status of a worker that has lost its engine.
LOST_ENGINE = 70

# In a worker of another node: what ends its main thread.
_worker: _Ending | None = None


def node_of(vllm_config: Any) -> int | None:
    """The number of this node within an engine of ours; None if the engine has no other."""
    parallel = vllm_config.parallel_config
    if not is_ours(vllm_config.model_config) or parallel.nnodes_within_dp == 1:
        return None
    return parallel.node_rank_within_dp


def settings_of(vllm_config: Any) -> dict[str, Any]:
    """What all nodes must be started with alike, by flag: each rank decodes by its own."""
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    return {
        "--additional-config, --diffusion-config or the checkpoint": model.dllm,
        "--dtype": str(model.dtype),
        "--max-num-seqs": scheduler.max_num_seqs,
        "--max-num-batched-tokens": scheduler.max_num_batched_tokens,
        "--async-scheduling": scheduler.async_scheduling,
    }


def interruptible(queue: Any, reason: Callable[[], str | None] = lambda: None) -> None:
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


# ---- workers


class _Ending:
    """How the main thread of a worker comes to its end.

    Attributes:
        asked: set when the engine was asked to end, and this worker with it.
        lifeline: the connection to the engine, once there is one.
    """

    def __init__(self, worker: Any, shutdown_requested: threading.Event) -> None:
        self.asked = threading.Event()
        self.lifeline: socket.socket | None = None
        self._lets_go = False
        self._queue = worker.rpc_broadcast_mq
        self._shutdown_requested = shutdown_requested
        interruptible(self._queue)

    def end(self, cause: str | None) -> None:
        """End this process. Runs in a thread of its own."""
        if cause is None:
            self.asked.set()
            self._shutdown_requested.set()
            self._queue.shutdown()
            threading.main_thread().join(END_SECONDS)
            os._exit(0)
        if self._lets_go:
            return
        logger.error("dllm: %s", cause)
        with contextlib.suppress(OSError, KeyError), open(_file_of_cause(), "x") as file:
            file.write(cause)
        # The main thread may be in a collective operation with the dead, which nothing ends.
        os._exit(LOST_ENGINE)

    def let_go(self) -> None:
        """Tell the engine that this worker ends by itself, before a collective operation fails.

        Who takes part in one sees only that a connection has broken, and not whose.
        """
        self._lets_go = True
        if self.lifeline is not None:
            with contextlib.suppress(OSError):
                self.lifeline.shutdown(socket.SHUT_RDWR)


def _file_of_cause() -> str:
    return os.environ[REPORT] + ".lost"


def be_interruptible(original: Callable[..., None]) -> Callable[..., None]:
    """A decorator for what a worker calls once it is ready: it can be ended from now on."""

    def monitor_death_pipe(self: Any, death_pipe: Any, shutdown_requested: Any) -> None:
        global _worker
        if node_of(self.worker.vllm_config):
            _worker = _Ending(self, shutdown_requested)
        original(self, death_pipe, shutdown_requested)

    return monitor_death_pipe


def hold_in_worker(worker: Any, address: tuple[str, int, str]) -> dict[str, Any]:
    """Connect this worker to the engine, if it is on another node. Called by the executor.

    Returns:
        the settings that this worker was started with.
    """
    node = node_of(worker.vllm_config)
    if node and _worker is not None:
        _worker.lifeline = hold(address, worker.global_rank, node, _worker.end)
    return settings_of(worker.vllm_config)


def fail_unless_asked(original: Callable[..., None]) -> Callable[..., None]:
    """A decorator for what a worker calls at its end: its exit status says whether it was asked."""

    def shutdown(self: Any) -> None:
        if _worker is not None and not _worker.asked.wait(ASKED_SECONDS):
            _worker.let_go()
        original(self)
        if _worker is not None and not _worker.asked.is_set():
            raise SystemExit(1)  # vLLM's workers end with 0 after an exception

    return shutdown


# ---- the process that started the workers


def end_with_first_node(original: Callable[..., None]) -> Callable[..., None]:
    """A decorator for what waits for a worker to end: the node then ends with a status and why."""

    def start_worker_monitor(self: Any, inline: bool = False) -> None:
        if not inline or node_of(self.vllm_config) is None:
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
