"""How a server is shut down: its running requests are answered first.

vLLM by itself ends at once: its ``--shutdown-timeout`` is 0, and running requests hear nothing or
get status 500.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any

from vllm.exceptions import GracefulHTTPError
from vllm.logger import init_logger

logger = init_logger("vllm.dllm")

# Seconds that may pass after the running requests have ended. The first are for the engine to free
# its device, the second for clients to read their answers.
TEARDOWN_SECONDS, CLOSE_SECONDS = 10.0, 5.0
# Seconds between refusing requests and ending what sends the refusals.
REFUSAL_SECONDS = 0.5
# Several API servers are killed by their parent when the time is over, so they refuse earlier.
MARGIN_SECONDS = 2.0
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class ShuttingDownError(GracefulHTTPError):
    """Status 503: another server may have time for the request."""

    def __init__(self) -> None:
        super().__init__(
            "The server is shutting down. Send the request to another one, or again later.",
            HTTPStatus.SERVICE_UNAVAILABLE,
        )


class GracefulShutdown:
    """The shutdown of one front end: of its requests, its engine and its HTTP server.

    Attributes:
        begun: a signal has asked the server to end; no new request is taken.
        second_signal: set when a second signal has asked it to end at once.
        app: the FastAPI app of the HTTP server, once there is one.
    """

    def __init__(self) -> None:
        self.begun = False
        self.second_signal = threading.Event()
        self.app: Any = None
        self._adding = 0
        self._aborting: asyncio.Future[Any] | None = None

    def refuse_when_asked(self) -> None:
        """Raises `ShuttingDownError` once the server was asked to end."""
        if self.begun:
            raise ShuttingDownError

    @contextlib.contextmanager
    def adding(self) -> Iterator[None]:
        """A context around handing a request to the engine; the shutdown waits for it to end.

        Raises:
            ShuttingDownError: the server takes no more requests.
        """
        self.refuse_when_asked()
        self._adding += 1
        try:
            yield
        finally:
            self._adding -= 1

    def shut_down(
        self, client: Any, timeout: float | None, stop_engine: Callable[[float | None], None]
    ) -> None:
        """Let the running requests end, then the engine.

        Args:
            client: vLLM's ``AsyncLLM``.
            timeout: seconds that running requests may take; None if no signal has asked for the
                shutdown.
            stop_engine: ends the engine; takes the seconds that this may take.
        """
        handler = getattr(client, "output_handler", None)
        # vLLM calls this on the event loop, too, when all is over. No request could be answered
        # there while this waits.
        if self.begun or timeout is None or handler is None or client.errored or _on_event_loop():
            stop_engine(timeout)
            return
        self.begun = True
        loop = handler.get_loop()
        server = getattr(self.app.state, "server", None) if self.app is not None else None
        loop.call_soon_threadsafe(self._react_to_second_signal, client, server)
        answered = self._wait_for_requests(client, timeout)
        if not answered:
            loop.call_soon_threadsafe(self._refuse_running, client)
            time.sleep(REFUSAL_SECONDS)
        stop_engine(TEARDOWN_SECONDS if answered else 0)
        if server is not None:
            loop.call_soon_threadsafe(loop.call_later, CLOSE_SECONDS, _close_connections, server)

    def _wait_for_requests(self, client: Any, seconds: float) -> bool:
        """Wait until all requests are answered; returns whether they are."""
        running = client.output_processor.request_states
        if seconds and getattr(client, "_client_count", 1) > 1:
            seconds = max(seconds - MARGIN_SECONDS, 0)
        if running and seconds:
            logger.info(
                "dllm: %d requests have up to %g s to end; a second signal ends them at once",
                len(running),
                seconds,
            )
        deadline = time.monotonic() + seconds
        while running or self._adding:
            if time.monotonic() >= deadline or client.errored or self.second_signal.wait(0.05):
                return False
        return True

    def _react_to_second_signal(self, client: Any, server: Any) -> None:
        """Handle further signals, which vLLM ignores. Runs on the event loop."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            # A loop outside the main thread can have no signal handlers.
            with contextlib.suppress(ValueError, RuntimeError):
                loop.add_signal_handler(number, self._hurry, client, server)

    def _hurry(self, client: Any, server: Any) -> None:
        logger.warning("dllm: a second signal; the server ends at once")
        self.second_signal.set()
        self._refuse_running(client)
        loop = asyncio.get_running_loop()
        loop.call_later(REFUSAL_SECONDS, _kill_engine, client)
        if server is not None:
            loop.call_later(2 * REFUSAL_SECONDS, _close_connections, server)

    def _refuse_running(self, client: Any) -> None:
        """Refuse the requests that still run, and let the engine forget them."""
        left = dict(client.output_processor.request_states)
        if not left:
            return
        logger.warning("dllm: %d requests are refused, the server ends", len(left))
        for state in left.values():
            # Each request gets an error of its own: a shared one would grow by a traceback for
            # each of them, and all of these would be logged.
            state.queue.put(ShuttingDownError())
        # An attribute, because the event loop itself does not keep its tasks from being collected.
        self._aborting = asyncio.ensure_future(client.abort(list(left), internal=True))


def engine_processes(client: Any) -> list[multiprocessing.Process]:
    """The engine processes that a client of vLLM's engine has started."""
    manager = client.engine_core.resources.engine_manager
    return list(getattr(manager, "processes", ()))


def _on_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _kill_engine(client: Any) -> None:
    for process in engine_processes(client):
        if process.is_alive():
            process.kill()


def _close_connections(server: Any) -> None:
    """Do not wait for clients that keep their connections open."""
    server.force_exit = True
    for connection in list(server.server_state.connections):
        connection.transport.abort()
