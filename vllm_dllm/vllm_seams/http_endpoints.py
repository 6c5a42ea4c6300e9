"""Wrap the HTTP server of one of our models where its requests begin and where it is built.

An offline process does not import this module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from vllm_dllm.frontend.http_request import Endpoints
from vllm_dllm.settings.resolution import TRACING_OPTIONS
from vllm_dllm.settings.unknown_names import option_names
from vllm_dllm.vllm_seams import decisions
from vllm_dllm.vllm_seams.wrapping import wrap

# The classes of the requests that generate text, each as its module and its name.
REQUESTS = (
    ("vllm.entrypoints.openai.completion.protocol", "CompletionRequest"),
    ("vllm.entrypoints.openai.chat_completion.protocol", "ChatCompletionRequest"),
    ("vllm.entrypoints.openai.chat_completion.protocol", "BatchChatCompletionRequest"),
    ("vllm.entrypoints.openai.responses.protocol", "ResponsesRequest"),
    ("vllm.entrypoints.scale_out.token_in_token_out.protocol", "GenerateRequest"),
)


def apply(model_config: Any) -> None:
    """Make the HTTP requests of a process that serves this model pass through the front end."""
    classes = tuple(getattr(import_module(module), name) for module, name in REQUESTS)
    # Others have a field `trace`, too, and no trace changes an answer.
    endpoints = Endpoints(classes, option_names() - TRACING_OPTIONS.keys())

    async def check_model(original: Callable[..., Any], self: Any, request: Any) -> Any:
        """Every vLLM handler begins with it."""
        error = await original(self, request)
        if error is None:
            endpoints.take(request)
        return error

    def init_exception_handler(original: Callable[..., Any], app: Any) -> None:
        """Add to the application while vLLM builds it, because it is complete once handed over."""
        from vllm_dllm.frontend.http_server import install

        if app.state.args.tool_call_parser:
            from vllm_dllm.frontend.tool_calls import check_parser

            check_parser(app.state.args.tool_call_parser)
        original(app)
        install(app, endpoints.refuse_misplaced)

    handlers = import_module("vllm.entrypoints.serve.engine.serving").BaseServing
    wrap(handlers, "_check_model", check_model)
    wrap(import_module("vllm.parser").ParserManager, "get_parser", _feed_single_tokens)
    if "vllm.entrypoints.launchers.api_server.entry" in sys.modules:
        application = import_module("vllm.entrypoints.launchers.app")
        wrap(application, "init_exception_handler", init_exception_handler)
    follow_parameters()
    decisions.register(model_config)


def follow_parameters() -> None:
    """Make this process follow the schema of every tool's parameters.

    By default vLLM constrains nothing if a call is optional and no tool is strict. The option
    ``--tool-strict-level`` on the command line still overrides this, also with ``auto``, and so
    does a tool parser that has its own default.
    """
    from vllm.tool_parsers.abstract_tool_parser import ToolParser, ToolParserManager
    from vllm.tool_parsers.tool_strict_level import ToolStrictLevel

    if not any(word.replace("_", "-").startswith("--tool-strict-level") for word in sys.argv):
        ToolParser.default_tool_strict_level = ToolStrictLevel.PARAMETER
    parser = "vllm_dllm.frontend.gemma_tool_parser"
    ToolParserManager.register_lazy_module("gemma4", parser, "GemmaToolParser")


def _feed_single_tokens(original: Callable[..., Any], cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Make the parser of reasoning and tool calls take one token at a time."""
    parser = original(cls, *args, **kwargs)
    if parser is None:
        return None
    from vllm_dllm.frontend.one_token_deltas import one_token_at_a_time, split_open_call_first

    responses = import_module("vllm.entrypoints.openai.responses.serving")
    wrap(responses, "split_delta", split_open_call_first)
    return one_token_at_a_time(parser)
