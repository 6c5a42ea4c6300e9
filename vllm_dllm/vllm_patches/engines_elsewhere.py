"""Engines of one server on several machines: what a node makes of the death of an engine elsewhere.

With ``--data-parallel-size-local`` the server of the first node sends requests to engines of other
nodes, which run there with ``--headless``. In vLLM a headless node ends with exit status 0 whatever
its engines did, and the first node watches only the processes that it has started: a request to an
engine that was killed elsewhere would wait forever.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from vllm_dllm.vllm_patches.engine_death import first_dead, note_cause
from vllm_dllm.vllm_patches.last_words import describe_end, fail_with_last_line
from vllm_dllm.vllm_patches.registration import is_ours
from vllm_dllm.vllm_patches.wrapping import wrap

# Seconds for which an engine may be without its connection: a network may lose one, and ZeroMQ
# makes it anew.
LOST_SECONDS = 3.0
_POLL_MILLISECONDS = 500


def apply_to_headless_node(manager: type[Any]) -> None:
    """Let a headless node of ours fail with its engine.

    Args:
        manager: vLLM's ``CoreEngineProcManager``.
    """
    wrap(manager, "monitor_engine_liveness", _fail_with_engine)


def apply_to_client(client: type[Any]) -> None:
    """Let the first node notice that an engine on another one is gone.

    Args:
        client: vLLM's ``MPClient``.
    """
    wrap(client, "start_engine_core_monitor", _watch_connections)


def _fail_with_engine(original: Callable[..., None]) -> Callable[..., None]:
    def monitor_engine_liveness(self: Any) -> None:
        original(self)
        # A node with an HTTP server calls this in a thread, and has its own way to end.
        headless = threading.current_thread() is threading.main_thread()
        dead = first_dead(self) if headless else None
        if dead is not None:
            fail_with_last_line(f"the engine died: {describe_end(dead)}")

    return monitor_engine_liveness


def _watch_connections(original: Callable[..., None]) -> Callable[..., None]:
    def start_engine_core_monitor(self: Any) -> None:
        original(self)
        parallel = self.vllm_config.parallel_config
        elsewhere = self.engine_ranks_managed[parallel.data_parallel_size_local :]
        # An elastic server connects and disconnects engines by itself.
        if elsewhere and is_ours(self.vllm_config.model_config) and not parallel.enable_elastic_ep:
            _Watch(self, elsewhere).start()

    return start_engine_core_monitor


class _Watch(threading.Thread):
    """Waits until a connection of an engine is lost for good, and then ends the client."""

    def __init__(self, client: Any, elsewhere: list[int]) -> None:
        import zmq

        super().__init__(daemon=True, name="dllm-engines-elsewhere")
        # The thread must not keep the client alive.
        self.client, self.elsewhere = weakref.ref(client), elsewhere
        address = f"inproc://dllm-engines-elsewhere-{id(client)}"
        # All engines send their answers to this socket.
        client.resources.output_socket.monitor(
            address, zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
        )
        self.events = zmq.Context.shadow(client.ctx.underlying).socket(zmq.PAIR)
        self.events.linger = 0
        self.events.connect(address)

    def run(self) -> None:
        missing, since = 0, 0.0
        try:
            while (client := self.client()) is not None and _is_running(client):
                if missing and time.monotonic() - since > LOST_SECONDS:
                    self.end(client)
                    return
                del client
                change = self.change()
                since = time.monotonic() if change > 0 else since
                missing = max(0, missing + change)
        finally:
            self.events.close()

    def change(self) -> int:
        """How many connections more are missing than before; waits for half a second."""
        import zmq
        from zmq.utils.monitor import recv_monitor_message

        if not self.events.poll(_POLL_MILLISECONDS):
            return 0
        event = recv_monitor_message(self.events)["event"]
        return 1 if event == zmq.EVENT_DISCONNECTED else -1  # no others are asked for

    def end(self, client: Any) -> None:
        """What vLLM does once an engine of this node has died."""
        several = len(self.elsewhere) > 1
        ranks = ", ".join(map(str, self.elsewhere))
        note_cause(
            f"{'one of the data-parallel ranks' if several else 'data-parallel rank'} {ranks} on "
            f"{'other nodes' if several else 'another node'} has been gone for "
            f"{LOST_SECONDS:g} s; the log there says why"
        )
        client.resources.engine_dead = True
        if client.resources.engine_manager is not None:
            # Else it gives the engines of this node seconds to end, for which all requests wait.
            client.resources.engine_manager.shutdown(timeout=0)
        client.shutdown()


def _is_running(client: Any) -> bool:
    return client._finalizer.alive and not client.resources.engine_dead
