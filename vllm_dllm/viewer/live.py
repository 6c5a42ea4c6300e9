"""Serve the live page of traces next to the API of ``vllm serve``.

    vllm serve MODEL --middleware vllm_dllm.viewer.live.LivePage

``/dllm`` is the page, which contains nothing about any request. ``/dllm/traces?since=N&run=RUN``
returns what has changed since then, as JSON, to those who may call the API. Both are answered here,
before vLLM's own checks, so the API key of a request is compared here, with vLLM's own function.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs

from starlette.datastructures import Headers
from starlette.responses import HTMLResponse, Response
from vllm import envs
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

from vllm_dllm.frontend import FRONT_END
from vllm_dllm.frontend.traces import LIVE_TRACES
from vllm_dllm.tracing.live import MOST_ANSWERS, LiveTraces
from vllm_dllm.viewer.page import live_page, policy, token_ids

logger = logging.getLogger("vllm.dllm.viewer")

PAGE, TRACES = "/dllm", "/dllm/traces"
HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
# A token's text is requested repeatedly, and no vocabulary is much larger than this.
MOST_TEXTS = 1 << 18
NAME_CHARACTERS = 200

Scope = dict[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]


class LivePage:
    """ASGI middleware that answers `PAGE` and `TRACES`, and passes on everything else.

    Every request of the server is traced from the middleware's first call on. That call precedes
    the first request, because servers begin with a call for their lifespan.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._source: Source | None = None

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """See ASGI."""
        if self._source is None:
            self._source = Source(self._app, scope["app"].state)
        if scope["type"] == "http":
            # This is how vLLM determines which of its paths need a key.
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            if path in (PAGE, PAGE + "/", TRACES):
                await self._source.answer(path, scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _json(status: HTTPStatus, content: dict[str, Any], **headers: str) -> Response:
    text = json.dumps(content, separators=(",", ":"))
    return Response(text, status, HEADERS | headers, "application/json")


class Source:
    """The answers that the page of a server gets."""

    def __init__(self, app: App, state: Any) -> None:
        """Start tracing every request; `state` is that of vLLM's application."""
        keys = [key for key in (state.args.api_key or [envs.VLLM_API_KEY]) if key]
        self._guard = AuthenticationMiddleware(app, keys) if keys else None
        client = state.engine_client
        parallel = client.vllm_config.parallel_config
        front_end: Any = getattr(client.input_processor, FRONT_END, None)
        self._tokenizer = client.input_processor.tokenizer
        self._text_of = functools.lru_cache(MOST_TEXTS)(lambda it: self._tokenizer.decode([it]))
        self._live = LiveTraces(client.output_processor.request_states, self._name_of)
        servers, replicas = parallel._api_process_count, parallel.data_parallel_size
        self.problem: str | None = None  # why there are no traces
        if front_end is None:
            self.problem = "vllm-dllm does not serve the model of this server, and traces no other"
        elif servers > 1 or replicas > 1:
            option = "--data-parallel-size" if replicas > 1 else "--api-server-count"
            self.problem = (
                f"the page shows the requests of one process and one engine; remove {option} "
                f"{max(servers, replicas)}, or --middleware vllm_dllm.viewer.live.LivePage"
            )
        if self.problem is not None:
            logger.warning("%s has nothing to show: %s", PAGE, self.problem)
            return
        setattr(client.output_processor, LIVE_TRACES, self._live)
        front_end.traces_all = True
        logger.info("Every request is traced, for the page %s", PAGE)

    def answer(self, path: str, scope: Scope) -> Response:
        """Answer a request for `PAGE` or `TRACES`."""
        if scope["method"] not in ("GET", "HEAD"):
            error = {"error": "only GET and HEAD are supported here"}
            return _json(HTTPStatus.METHOD_NOT_ALLOWED, error, Allow="GET, HEAD")
        if path != TRACES:
            text = live_page()
            return HTMLResponse(text, headers=HEADERS | {"Content-Security-Policy": policy(text)})
        if self._guard is not None and not self._guard.verify_token(Headers(scope=scope)):
            error = {"error": "Unauthorized"}
            return _json(HTTPStatus.UNAUTHORIZED, error, **{"WWW-Authenticate": "Bearer"})
        if self.problem is not None:
            return _json(HTTPStatus.CONFLICT, {"error": self.problem})
        asked = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        (since,), (run,) = asked.get("since", ["0"])[-1:], asked.get("run", [""])[-1:]
        if not (since.isascii() and since.isdecimal() and len(since) < 19):
            return _json(HTTPStatus.BAD_REQUEST, {"error": "since must be a whole number"})
        # A page of another server gets everything.
        news = self._live.news(int(since) if run == self._live.run else 0)
        news["most"] = MOST_ANSWERS
        ids = token_ids(each["block"] for each in news["blocks"])
        known = () if self._tokenizer is None else ids
        news["texts"] = {str(token): self._text_of(token) for token in known}
        return _json(HTTPStatus.OK, news)

    def _name_of(self, state: Any) -> str:
        """The end of a request's prompt, given vLLM's ``RequestState``."""
        text = state.prompt
        if text is None and self._tokenizer is not None and state.prompt_token_ids:
            text = self._tokenizer.decode(state.prompt_token_ids[-NAME_CHARACTERS:])
        if text is None:
            text = f"{state.prompt_len} tokens"
        cut = len(text) > NAME_CHARACTERS
        name = ("\u2026" if cut else "") + text[-NAME_CHARACTERS:]
        return name if state.parent_req is None else f"{name} (choice {state.request_index})"
