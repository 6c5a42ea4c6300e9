"""Where vLLM's servers end: when they are asked to, and when their engine dies.

`frontend.shutdown` says how a server that was asked to end does so. A dead engine by itself ends
vLLM's server with exit status 0, which a supervisor takes for success; see `engine_death`.

This module imports vLLM, and is imported only where a server of ours is running.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from vllm_dllm.frontend import front_end_of
from vllm_dllm.frontend.shutdown import SIGNALS, GracefulShutdown, engine_processes
from vllm_dllm.vllm_patches.engine_death import cause_of_death, engine_ended_well
from vllm_dllm.vllm_patches.last_words import fail_with_last_line
from vllm_dllm.vllm_patches.wrapping import wrap


def apply_to_client(client: type[Any]) -> None:
    """Answer running requests before ``AsyncLLM`` ends its engine, and be unhealthy meanwhile."""
    wrap(client, "shutdown", _answer_first)
    wrap(client, "check_health", _unhealthy_while_ending)


def apply_to_http_server(entry: ModuleType) -> None:
    """Let the HTTP server fail with its engine. `entry` is the module that starts the server."""
    wrap(entry, "serve_http", _fail_with_engine)


def apply_to_parent_of_api_servers() -> None:
    """Let the parent of several API servers end as a single server does.

    Called once the parent knows that the model is ours. In another process nothing is wrapped.
    """
    parent = sys.modules.get("vllm.entrypoints.cli.serve")
    if parent is not None:
        from vllm_dllm.vllm_patches import engine_death

        engine_death.apply_to_parent_of_api_servers(parent)
        wrap(parent.APIServerProcessManager, "shutdown", _pass_second_signal_on)


def _shutdown_of(client: Any) -> GracefulShutdown | None:
    """The shutdown of an engine's client, or None if the model is not ours."""
    front_end = front_end_of(getattr(client, "input_processor", None))
    return None if front_end is None else front_end.shutdown


def _answer_first(original: Callable[..., None]) -> Callable[..., None]:
    def shutdown(self: Any, timeout: float | None = None) -> None:
        ours = _shutdown_of(self)
        if ours is None or getattr(self, "engine_core", None) is None:
            original(self, timeout)
        else:
            ours.shut_down(self, timeout, lambda seconds: original(self, seconds))

    return shutdown


def _unhealthy_while_ending(original: Callable[..., Any]) -> Callable[..., Any]:
    """``/health`` gets 503 as new requests do, so that who distributes them looks elsewhere."""

    async def check_health(self: Any) -> None:
        ours = _shutdown_of(self)
        if ours is not None:
            ours.refuse_when_asked()
        await original(self)

    return check_health


def _fail_with_engine(original: Callable[..., Any]) -> Callable[..., Any]:
    async def serve_http(app: Any, *args: Any, **kwargs: Any) -> Any:
        client = app.state.engine_client
        ours = _shutdown_of(client)
        if ours is None:
            return await original(app, *args, **kwargs)
        ours.app = app
        remaining = await original(app, *args, **kwargs)
        if ours.begun or not client.errored:
            return remaining
        if engine_ended_well(engine_processes(client)):
            return remaining
        remaining.close()  # a coroutine that nobody awaits now
        fail_with_last_line(cause_of_death(client.engine_core.resources.engine_manager))
        raise SystemExit(1)

    return serve_http


def _pass_second_signal_on(original: Callable[..., None]) -> Callable[..., None]:
    def shutdown(self: Any, timeout: float | None = None) -> None:
        def terminate_again(*_: object) -> None:
            for process in self.processes:
                if process.is_alive():
                    process.terminate()

        # Outside the main thread there can be no signal handlers.
        with contextlib.suppress(ValueError):
            for number in SIGNALS:
                signal.signal(number, terminate_again)
        original(self, timeout)

    return shutdown
