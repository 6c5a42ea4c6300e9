"""How a server ends: asked to, it answers what runs first; its engine dead, it says why and fails.

Each method is given one of vLLM's functions, or stands around one; `compat` knows the places.

vLLM by itself ends at once: its ``--shutdown-timeout`` is 0 and running requests hear nothing or a
500. A dead engine ends the server with exit status 0, which a supervisor takes for success.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from http import HTTPStatus
from typing import Any

from vllm.exceptions import GracefulHTTPError
from vllm.logger import init_logger

from vllm_dllm.frontend import FRONT_END
from vllm_dllm.vllm_patches.engine_death import cause_of_death, speak_last

logger = init_logger("vllm.dllm")

# After the drain: for the engine to free its device, and for clients to read their answers.
TEARDOWN_SECONDS, CLOSE_SECONDS = 10.0, 5.0
# Between a refusal and the end of what would send it.
REFUSAL_SECONDS = 0.5
# With several API servers their parent kills them when the time is over; they refuse before.
MARGIN_SECONDS = 2.0
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class ShuttingDownError(GracefulHTTPError):
    """Status 503: another server may have time for the request."""

    def __init__(self) -> None:
        super().__init__(
            "The server is shutting down. Send the request to another one, or again later.",
            HTTPStatus.SERVICE_UNAVAILABLE,
        )


class Ending:
    """Of one front end: its requests, its engine and its HTTP server.

    Attributes:
        asked: a signal has asked the server to end; no new request is taken.
        hurried: a second one has asked it to do so at once.
    """

    def __init__(self) -> None:
        self.asked = False
        self.hurried = threading.Event()
        self._adding = 0
        self._app: Any = None

    def refuse_when_ending(self) -> None:
        """Raises `ShuttingDownError` once the server was asked to end."""
        if self.asked:
            raise ShuttingDownError

    @contextlib.contextmanager
    def adding(self) -> Iterator[None]:
        """Around a request that is being handed to the engine; the drain waits for it.

        Raises:
            ShuttingDownError: the server takes no more.
        """
        self.refuse_when_ending()
        self._adding += 1
        try:
            yield
        finally:
            self._adding -= 1

    async def serve(self, original: Callable[[], Coroutine[Any, Any, Any]], app: Any) -> Any:
        """Serve HTTP until the end.

        Args:
            original: vLLM's ``serve_http`` for this app; gives what is left to await.
            app: the FastAPI app, whose state has the engine's client.

        Raises:
            SystemExit: the engine died; with status 1, and the reason as the log's last line.
        """
        self._app, client = app, app.state.engine_client
        rest = await original()
        if self.asked or not client.errored or _ended_well(client):
            return rest
        rest.close()
        speak_last(cause_of_death(_engine_processes(client)))
        raise SystemExit(1)

    def stop(self, client: Any, timeout: float | None, original: Callable[..., None]) -> None:
        """End the engine, its running requests first.

        Args:
            client: vLLM's ``AsyncLLM``.
            timeout: seconds that running requests may take; None where nobody was asked.
            original: ends the engine; takes the seconds that it may take.
        """
        handler = getattr(client, "output_handler", None)
        # On the event loop nothing could be answered while this waits: vLLM calls it there when
        # all is over.
        if self.asked or timeout is None or handler is None or client.errored or _on_a_loop():
            original(timeout)
            return
        self.asked = True
        loop = handler.get_loop()
        server = getattr(self._app.state, "server", None) if self._app is not None else None
        loop.call_soon_threadsafe(self._hear_the_next_signal, client, server)
        drained = self._drain(client, timeout)
        if not drained:
            loop.call_soon_threadsafe(self._give_up, client)
            time.sleep(REFUSAL_SECONDS)
        original(TEARDOWN_SECONDS if drained else 0)
        if server is not None:
            loop.call_soon_threadsafe(loop.call_later, CLOSE_SECONDS, _close, server)

    def _drain(self, client: Any, seconds: float) -> bool:
        """Wait until all requests are answered; whether they are."""
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
            if time.monotonic() >= deadline or client.errored or self.hurried.wait(0.05):
                return False
        return True

    def _hear_the_next_signal(self, client: Any, server: Any) -> None:
        """VLLM passes over every signal but the first."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            # Not in the main thread, where nobody could send one.
            with contextlib.suppress(ValueError, RuntimeError):
                loop.add_signal_handler(number, self._hurry, client, server)

    def _hurry(self, client: Any, server: Any) -> None:
        logger.warning("dllm: a second signal; the server ends at once")
        self.hurried.set()
        self._give_up(client)
        loop = asyncio.get_running_loop()
        loop.call_later(REFUSAL_SECONDS, _kill, client)
        if server is not None:
            loop.call_later(2 * REFUSAL_SECONDS, _close, server)

    def _give_up(self, client: Any) -> None:
        """Refuse what still runs, and let the engine forget it."""
        left = dict(client.output_processor.request_states)
        if not left:
            return
        logger.warning("dllm: %d requests are refused, the server ends", len(left))
        for state in left.values():
            # One each: a shared one would grow by a traceback for each of them, into the log.
            state.queue.put(ShuttingDownError())
        self._aborting = asyncio.ensure_future(client.abort(list(left), internal=True))


def _ending_of(client: Any) -> Ending | None:
    """Of an engine's client, where the model is ours."""
    front_end = getattr(getattr(client, "input_processor", None), FRONT_END, None)
    return None if front_end is None else front_end.ending


def answering_first(original: Callable[..., None]) -> Callable[..., None]:
    """``AsyncLLM.shutdown``, see `Ending.stop`."""

    def shutdown(self: Any, timeout: float | None = None) -> None:
        ending = _ending_of(self)
        if ending is None or getattr(self, "engine_core", None) is None:
            original(self, timeout)
        else:
            ending.stop(self, timeout, lambda seconds: original(self, seconds))

    return shutdown


def failing_with_its_engine(original: Callable[..., Any]) -> Callable[..., Any]:
    """``serve_http``, see `Ending.serve`."""

    async def serve(app: Any, *args: Any, **named: Any) -> Any:
        ending = _ending_of(app.state.engine_client)
        if ending is None:
            return await original(app, *args, **named)
        return await ending.serve(lambda: original(app, *args, **named), app)

    return serve


def hurry_the_others(original: Callable[..., None]) -> Callable[..., None]:
    """``APIServerProcessManager.shutdown``: a second signal reaches the API servers, too."""

    def shutdown(self: Any, timeout: float | None = None) -> None:
        def again(*_: object) -> None:
            for process in self.processes:
                if process.is_alive():
                    process.terminate()

        with contextlib.suppress(ValueError):  # not in the main thread
            for number in SIGNALS:
                signal.signal(number, again)
        original(self, timeout)

    return shutdown


def outlive_signals() -> None:
    """Leave it to the engine when its worker processes end.

    Terminals and supervisors signal all processes of a server, and vLLM's workers end at once
    then, in the middle of requests that the engine would still answer. A worker ends when its
    engine closes their pipe or dies, and an engine that is not heard kills.
    """
    handler = signal.getsignal(signal.SIGTERM)
    if "WorkerProc." in getattr(handler, "__qualname__", ""):
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)


def _on_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _engine_processes(client: Any) -> list[multiprocessing.Process]:
    manager = client.engine_core.resources.engine_manager
    return list(getattr(manager, "processes", ()))


def _ended_well(client: Any) -> bool:
    """The engine was asked to end, and its front end not yet: a signal went to all processes."""
    processes = _engine_processes(client)
    return bool(processes) and all(process.exitcode == 0 for process in processes)


def _kill(client: Any) -> None:
    for process in _engine_processes(client):
        if process.is_alive():
            process.kill()


def _close(server: Any) -> None:
    """Do not wait for clients that keep their connections open."""
    server.force_exit = True
    for connection in list(server.server_state.connections):
        connection.transport.abort()
