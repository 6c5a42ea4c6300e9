"""The endpoints of vLLM's HTTP server that generate text."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_dllm.vllm_patches import beam_search, http_errors, tool_calls
from vllm_dllm.vllm_patches.wrapping import Decorator, wrap

if TYPE_CHECKING:
    from vllm_dllm.frontend.request_hooks import FrontEnd

_OPENAI = "vllm.entrypoints.openai"


class Endpoint(NamedTuple):
    """Where vLLM defines an endpoint.

    Attributes:
        package: its package, below `vllm.entrypoints.openai`.
        request_class: the class of its requests, in the package's module ``protocol``.
        serving_class: what handles them, in the package's module ``serving``.
        handler: the method that does.
    """

    package: str
    request_class: str
    serving_class: str
    handler: str


ENDPOINTS = (
    Endpoint("completion", "CompletionRequest", "OpenAIServingCompletion", "create_completion"),
    Endpoint(
        "chat_completion", "ChatCompletionRequest", "OpenAIServingChat", "create_chat_completion"
    ),
    Endpoint("responses", "ResponsesRequest", "OpenAIServingResponses", "create_responses"),
)
# Anthropic's API has it too, with other values; it changes no token.
_ANTHROPICS_OWN = {"service_tier"}


def apply(front_end: FrontEnd) -> None:
    """Let the requests of a process that serves HTTP pass the front end.

    An offline process has not imported vLLM's server. It is not imported here either, because that
    would take a second: its modules are looked up.
    """
    serves_http = False
    for endpoint in ENDPOINTS:
        protocol = sys.modules.get(f"{_OPENAI}.{endpoint.package}.protocol")
        if protocol is not None:
            _wrap_endpoint(endpoint, getattr(protocol, endpoint.request_class), front_end)
            serves_http = True
    entry = sys.modules.get("vllm.entrypoints.launchers.api_server.entry")
    if entry is not None:
        # Only here, because it imports vLLM, which importing this module must not.
        from vllm_dllm.vllm_patches import shutdown

        shutdown.apply_to_http_server(entry)
    if serves_http:
        messages = import_module("vllm.entrypoints.anthropic.serving").AnthropicServingMessages
        wrap(messages, "create_messages", _refuse_what_messages_drop(front_end))
        http_errors.apply()
        # Only here, because it imports vLLM, too.
        from vllm_dllm.vllm_patches import traces

        traces.apply_to_http_server()
        # A constraint behind reasoning is refused, and none must be added to such requests.
        if not front_end.structured.settings.begins_with_reasoning:
            tool_calls.follow_parameters()


def _wrap_endpoint(endpoint: Endpoint, request_class: type[Any], front_end: FrontEnd) -> None:
    # Imported, not looked up: the server has imported the requests, but not yet their handlers.
    serving = import_module(f"{_OPENAI}.{endpoint.package}.serving")
    front_end.request_classes.append(request_class)
    wrap(request_class, "to_sampling_params", _refuse_before_the_answer(front_end))
    beam_search.refuse_in_requests(request_class)
    wrap(getattr(serving, endpoint.serving_class), endpoint.handler, _answer_through(front_end))


def _refuse_before_the_answer(front_end: FrontEnd) -> Decorator:
    def decorator(original: Callable[..., Any]) -> Callable[..., Any]:
        def to_sampling_params(request: Any, *args: Any, **kwargs: Any) -> Any:
            return front_end.convert(request, lambda: original(request, *args, **kwargs))

        return to_sampling_params

    return decorator


def _answer_through(front_end: FrontEnd) -> Decorator:
    def decorator(original: Callable[..., Any]) -> Callable[..., Any]:
        async def handle(*args: Any, **kwargs: Any) -> Any:
            arguments = [*args, *kwargs.values()]
            answer = await front_end.answer(arguments, lambda: original(*args, **kwargs))
            return http_errors.with_flags(answer, front_end.tool_parser)

        return handle

    return decorator


def _refuse_what_messages_drop(front_end: FrontEnd) -> Decorator:
    """Refuse fields of Anthropic's endpoint that others honour.

    VLLM turns such a request into one of a chat, so all else is done there. But its class drops the
    fields that it does not know, so only the body still has them.
    """

    def decorator(original: Callable[..., Any]) -> Callable[..., Any]:
        async def create_messages(self: Any, request: Any, raw_request: Any = None) -> Any:
            if raw_request is not None:
                known = {*type(request).model_fields, *_ANTHROPICS_OWN}
                body = await raw_request.json()
                front_end.refuse_misplaced({k: v for k, v in body.items() if k not in known})
            return await original(self, request, raw_request)

        return create_messages

    return decorator
