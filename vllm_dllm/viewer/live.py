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
from collections.abc import Awaitable, Callable, Iterable
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs

from starlette.datastructures import Headers
from vllm import envs
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

from vllm_dllm.frontend.live_traces import MOST_ANSWERS, Answer, LiveTraces, trace_every_request
from vllm_dllm.startup.live_page import obstacle
from vllm_dllm.tracing.trace import Block
from vllm_dllm.viewer.lines import token_ids
from vllm_dllm.viewer.page import live_page, policy

logger = logging.getLogger("vllm.dllm.viewer")

PAGE, TRACES = "/dllm", "/dllm/traces"
HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
# A token's text is requested repeatedly, and no vocabulary is much larger than this.
MOST_TEXTS = 1 << 18

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
        """Answer a request; see ASGI for the arguments."""
        if self._source is None:
            self._source = Source(scope["app"].state)
        if scope["type"] == "http":
            # This is how vLLM determines which of its paths need a key.
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            if path in (PAGE, PAGE + "/", TRACES):
                await _send(self._source.answer(path, scope), scope["method"], send)
                return
        await self._app(scope, receive, send)


class Reply:
    """An HTTP answer."""

    def __init__(self, status: HTTPStatus, kind: str, body: str, **headers: str) -> None:
        """Make an answer.

        Args:
            status: the HTTP status.
            kind: the media type.
            body: the text.
            headers: more headers; an underscore stands for a hyphen.
        """
        self.status = status
        self.body = body.encode()
        more = {name.replace("_", "-"): value for name, value in headers.items()}
        length = {"Content-Type": kind, "Content-Length": str(len(self.body))}
        self.headers = {**HEADERS, **length, **more}


def _json(status: HTTPStatus, content: dict[str, Any], **headers: str) -> Reply:
    text = json.dumps(content, separators=(",", ":"))
    return Reply(status, "application/json", text, **headers)


async def _send(reply: Reply, method: str, send: Any) -> None:
    headers = [(name.lower().encode(), value.encode()) for name, value in reply.headers.items()]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    body = b"" if method == "HEAD" else reply.body
    await send({"type": "http.response.body", "body": body})


class Source:
    """The answers that the page of a server gets.

    Attributes:
        problem: why there are no traces, in one sentence; None if there are.
    """

    def __init__(self, state: Any) -> None:
        """Start tracing every request.

        Args:
            state: the state of vLLM's application, with the engine's client and the arguments.
        """
        keys = [key for key in (state.args.api_key or [envs.VLLM_API_KEY]) if key]
        self._guard = AuthenticationMiddleware(_nothing, keys) if keys else None
        client = state.engine_client
        parallel = client.vllm_config.parallel_config
        self._live: LiveTraces | None = None
        self.problem = obstacle(parallel._api_process_count, parallel.data_parallel_size)
        if self.problem is None:
            self._live = trace_every_request(client)
        if self.problem is None and self._live is None:
            self.problem = "the model of this server is none of vllm-dllm, and no other is traced"
        if self.problem is not None:
            logger.warning("%s has nothing to show: %s", PAGE, self.problem)
        else:
            logger.info("Every request is traced, for the page %s", PAGE)
        self._tokenizer = client.input_processor.tokenizer
        self._text_of = functools.lru_cache(MOST_TEXTS)(self._decode)

    def answer(self, path: str, scope: Scope) -> Reply:
        """Answer a request.

        Args:
            path: `PAGE` or `TRACES`.
            scope: the ASGI scope of the request.
        """
        if scope["method"] not in ("GET", "HEAD"):
            error = {"error": "only GET and HEAD are known here"}
            return _json(HTTPStatus.METHOD_NOT_ALLOWED, error, Allow="GET, HEAD")
        if path != TRACES:
            text = live_page()
            security = policy(text)
            return Reply(
                HTTPStatus.OK, "text/html; charset=utf-8", text, Content_Security_Policy=security
            )
        if self._guard is not None and not self._guard.verify_token(Headers(scope=scope)):
            error = {"error": "Unauthorized"}
            return _json(HTTPStatus.UNAUTHORIZED, error, WWW_Authenticate="Bearer")
        if self._live is None:
            return _json(HTTPStatus.CONFLICT, {"error": self.problem})
        asked = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        (since,), (run,) = asked.get("since", ["0"])[-1:], asked.get("run", [""])[-1:]
        if not (since.isascii() and since.isdecimal() and len(since) < 19):
            return _json(HTTPStatus.BAD_REQUEST, {"error": "since must be a whole number"})
        return _json(HTTPStatus.OK, self._news(self._live, int(since), run))

    def _news(self, live: LiveTraces, since: int, run: str) -> dict[str, Any]:
        """The news since the page's last call, or everything if `run` is that of another server."""
        news = live.news(since if run == live.run else 0)
        plain = [_plain(block) for _, _, block in news.blocks]
        blocks = [
            {"answer": answer.number, "index": index, "block": block}
            for (answer, index, _), block in zip(news.blocks, plain, strict=True)
        ]
        ids = token_ids(plain)
        return {
            "run": live.run,
            "now": news.now,
            "more": news.more,
            "kept": news.kept,
            "gone": news.gone,
            "most": MOST_ANSWERS,
            "answers": _described(news.answers),
            "blocks": blocks,
            "texts": {} if self._tokenizer is None else {str(t): self._text_of(t) for t in ids},
        }

    def _decode(self, token: int) -> str:
        text: str = self._tokenizer.decode([token])
        return text


def _described(answers: Iterable[Answer]) -> list[dict[str, Any]]:
    return [
        {
            "number": each.number,
            "name": each.name,
            "prompt_length": each.prompt_length,
            "tokens": each.tokens,
            "running": each.running,
            "blocks": len(each.blocks),
        }
        for each in answers
    ]


def _plain(block: Block) -> dict[str, Any]:
    """Do what `dataclasses.asdict` does, in a tenth of the time and without its copies."""
    return {
        **vars(block),
        "passes": [vars(each) for each in block.passes],
        "events": [vars(each) for each in block.events],
    }


async def _nothing(scope: Scope, receive: Any, send: Any) -> None:
    """The application behind vLLM's guard, which is used only to compare keys."""
