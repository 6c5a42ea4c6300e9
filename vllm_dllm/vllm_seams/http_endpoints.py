"""Wrap the HTTP server of one of our models where its requests begin and where it is built."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from vllm_dllm.vllm_seams.wrapping import Decorator, wrap

if TYPE_CHECKING:
    from vllm_dllm.frontend.request_hooks import FrontEnd

# The classes of the requests that generate text, each as its module and its name.
REQUESTS = (
    ("vllm.entrypoints.openai.completion.protocol", "CompletionRequest"),
    ("vllm.entrypoints.openai.chat_completion.protocol", "ChatCompletionRequest"),
    ("vllm.entrypoints.openai.chat_completion.protocol", "BatchChatCompletionRequest"),
    ("vllm.entrypoints.openai.responses.protocol", "ResponsesRequest"),
    ("vllm.entrypoints.scale_out.token_in_token_out.protocol", "GenerateRequest"),
)


def apply(front_end: FrontEnd) -> None:
    """Make the requests of a process that serves HTTP pass through the front end.

    An offline process has not imported vLLM's server. It is not imported here either, because that
    would take a second.
    """
    if REQUESTS[0][0] not in sys.modules:
        return
    front_end.request_classes += [getattr(import_module(m), name) for m, name in REQUESTS]
    handlers = import_module("vllm.entrypoints.serve.engine.serving").BaseServing
    wrap(handlers, "_check_model", _take(front_end))
    if "vllm.entrypoints.launchers.api_server.entry" in sys.modules:
        application = import_module("vllm.entrypoints.launchers.app")
        wrap(application, "init_exception_handler", _install(front_end))
    # A constraint after reasoning is refused, so none must be added to such requests.
    if not front_end.structured.settings.begins_with_reasoning:
        follow_parameters()


def follow_parameters() -> None:
    """Make this process follow the schema of every tool's parameters.

    By default vLLM constrains nothing if a call is optional and no tool is strict. The option
    ``--tool-strict-level`` still overrides this, and so does a tool parser that has its own
    default.
    """
    # Imported only here, because an offline process does not need vLLM's tool parsers.
    from vllm.tool_parsers.abstract_tool_parser import ToolParser, ToolParserManager
    from vllm.tool_parsers.tool_strict_level import ToolStrictLevel

    from vllm_dllm.frontend.tool_calls import GEMMA

    ToolParser.default_tool_strict_level = ToolStrictLevel.PARAMETER
    parser = "vllm_dllm.frontend.gemma_tool_parser"
    ToolParserManager.register_lazy_module(GEMMA, parser, "GemmaToolParser")


def _take(front_end: FrontEnd) -> Decorator:
    """Wrap the check of the model's name, with which every vLLM handler begins."""

    def decorator(original: Callable[..., Any]) -> Callable[..., Any]:
        async def _check_model(self: Any, request: Any) -> Any:
            error = await original(self, request)
            if error is None:
                front_end.take(request)
            return error

        return _check_model

    return decorator


def _install(front_end: FrontEnd) -> Decorator:
    """Add to the application while vLLM builds it, because it is complete once handed over."""

    def decorator(original: Callable[..., Any]) -> Callable[..., Any]:
        def init_exception_handler(app: Any) -> None:
            from vllm_dllm.frontend.http_server import install

            original(app)
            install(app, front_end.refuse_misplaced)

        return init_exception_handler

    return decorator
