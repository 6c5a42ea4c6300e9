"""Changes to the answers of a diffusion model's HTTP server.

VLLM begins a streamed answer, with status 200, before it looks at the request's sampling
parameters and its constraint. `StatusAfterAdmission` holds the beginning back until the engine has
taken the request, so a refused request gets the same status and body with ``stream`` as without.
It also adds traces to answers, and turns status 500 of a LoRA adapter that is refused into 400.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from vllm import envs
from vllm.entrypoints.anthropic.api_router import translate_error_response
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.utils.api_utils import validate_json_request

from vllm_dllm.frontend import current
from vllm_dllm.frontend.http_request import HttpRequest

MESSAGES = "/v1/messages"
ADAPTERS = "/v1/load_lora_adapter"
# What vLLM's message begins with if the engine has refused an adapter and goes on.
REFUSED_ADAPTER = "Call to add_lora method failed"
# Where vLLM drops unknown fields; its handlers see those of the other endpoints.
DROPPING = (MESSAGES, "/inference/v1/generate", "/v1/systemone")

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]


def install(app: Starlette, refuse_misplaced: Callable[[Mapping[str, Any]], None]) -> None:
    """Add to vLLM's application the middleware, and `refuse_misplaced` for fields of requests."""
    # The innermost middleware, so that the others (metrics, CORS) see the status that is sent.
    app.user_middleware.append(Middleware(StatusAfterAdmission))

    async def validate(raw_request: Request) -> None:
        await validate_json_request(raw_request)
        if raw_request.scope["route"].path not in DROPPING:
            return
        body = await raw_request.json()  # FastAPI has parsed it
        if isinstance(body, dict):
            refuse_misplaced(body)
            if isinstance(nested := body.get("sampling_params"), dict):
                refuse_misplaced({**nested, "extra_args": None})  # where our options belong

    # FastAPI reads a function's own annotations, which are strings in this module.
    validate.__annotations__ = {"raw_request": Request}
    app.dependency_overrides[validate_json_request] = validate  # type: ignore[attr-defined]


class StatusAfterAdmission:
    """ASGI middleware that begins an answer once the engine has taken its request."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Any, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        http, held, begun = HttpRequest(scope["path"], client_of(scope)), list[Message](), False

        async def release() -> None:
            while held:
                await send(held.pop(0))

        async def take(message: Message) -> None:
            nonlocal begun
            held.append(message)
            begun = begun or _may_begin(http, held)
            if begun:
                await release()

        token = current.set(http)
        try:
            await self._app(scope, receive, take)
        except Exception:
            # After a refusal, an error is from a stream that vLLM believes has begun.
            if begun or http.error is None:
                raise
        finally:
            current.reset(token)
        if http.error is not None and not begun:
            response = await _response_to(http.error, Request(scope, receive))
            await response(scope, receive, send)
            return
        if http.path.endswith(ADAPTERS) and held and held[0]["status"] == 500:
            error = json.loads(_body(held))["error"]["message"]
            if error.startswith(REFUSED_ADAPTER):
                refusal = create_error_response(error)
                answer = JSONResponse(refusal.model_dump(), refusal.error.code)
                await answer(scope, receive, send)
                return
        if http.traced and held:
            held = _with_traces(held, http)
        await release()


def client_of(scope: Message) -> str:
    """Who sends a request: its API key, if that is one of the server's, or else its address."""
    key = Headers(scope=scope).get("Authorization", "").partition(" ")[2]
    if key and key in (scope["app"].state.args.api_key or [envs.VLLM_API_KEY]):
        return key
    return str((scope.get("client") or [""])[0])


def _may_begin(http: HttpRequest, held: list[Message]) -> bool:
    """Whether the messages that are held may be sent, given that nothing was sent before."""
    streams = any(
        name == b"content-type" and value.startswith(b"text/event-stream")
        for name, value in held[0].get("headers", ())
    )
    if http.request is None or not (streams or http.traced):
        return not http.path.endswith(ADAPTERS)
    # The first event shows that every prompt of the request was given to the engine. An answer with
    # traces begins when it is complete.
    return streams and http.error is None and http.admitted and len(held) > 1


def _body(held: list[Message]) -> bytes:
    """The body of a whole answer."""
    return b"".join(part.get("body", b"") for part in held[1:])


def _with_traces(held: list[Message], http: HttpRequest) -> list[Message]:
    """A whole answer with what its request asked for."""
    from vllm_dllm.frontend.traces import add_to_answer

    start, body = held[0], add_to_answer(_body(held), http.queues)
    headers = [(n, v) for n, v in start["headers"] if n.lower() != b"content-length"]
    start["headers"] = [*headers, (b"content-length", str(len(body)).encode())]
    return [start, {"type": "http.response.body", "body": body}]


async def _response_to(error: Exception, request: Request) -> Response:
    """The answer that vLLM gives to the same request without a stream."""
    if request.scope["path"].endswith(MESSAGES):
        return translate_error_response(create_error_response(error))
    handlers = request.app.exception_handlers
    handle = next(handlers[kind] for kind in type(error).__mro__ if kind in handlers)
    response: Response = await handle(request, error)
    return response
