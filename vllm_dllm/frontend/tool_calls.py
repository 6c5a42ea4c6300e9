"""Tool calls: what vLLM's structural tags for them require, and what they require here.

vLLM constrains the calls of a tool by the schema of its parameters if the tool is strict, or if the
server's ``--tool-strict-level`` is ``parameter``; `vllm_seams.http_endpoints` makes that the
default. So the schema of a tool that is not strict is followed, too. If such a schema is not
supported, its request is not refused: the arguments may then be any object.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from vllm_dllm.ranges import shown
from vllm_dllm.settings.request import CONSTRAINT_OPTIONS

# VLLM's name for the parser of Gemma's calls, and our name for their structural tag.
GEMMA = "gemma4"
ANY_OBJECT = {"type": "object"}
GEMMA_BEGIN = "<|tool_call>call:"
GEMMA_NAME = re.compile(r"[\w.-]+", re.ASCII)


class OptionalCalls(NamedTuple):
    """The constraint of a request that is constrained only by tool calls that it need not make.

    Attributes:
        asked_for: the request asks for a constraint, because a tool is strict or it sets an option
            of constraints. Otherwise the server has added the constraint.
    """

    asked_for: bool


def refuse_second_constraint(request: Any) -> None:
    """Refuse a constraint next to a required call: vLLM would replace it by the call's schema.

    Args:
        request: a request of vLLM's HTTP server, as it arrived.

    Raises:
        VLLMValidationError: the request has both.
    """
    constraint = getattr(request, "structured_outputs", None)
    if constraint is not None and _is_forced(getattr(request, "tool_choice", None)):
        raise VLLMValidationError(
            "structured_outputs and a required tool are two constraints on one answer; remove "
            'structured_outputs, or send tool_choice "auto" or "none".',
            parameter="structured_outputs",
        )


def optional_calls(request: Any) -> OptionalCalls | None:
    """The constraint that a request may have if it has optional tools and no format of its own.

    Args:
        request: a request of vLLM's HTTP server, as it arrived. vLLM turns its tools into a
            constraint later.

    Returns:
        None for any other request.
    """
    tools = getattr(request, "tools", None)
    if not tools or request.tool_choice != "auto" or request.structured_outputs is not None:
        return None
    # The first field belongs to the Chat Completions API, the second to the Responses API.
    form = getattr(request, "response_format", None)
    form = form or getattr(getattr(request, "text", None), "format", None)
    if form is not None and form.type != "text":
        return None
    options = request.vllm_xargs or {}
    asked_for = any(name in options for name in CONSTRAINT_OPTIONS)
    return OptionalCalls(asked_for or any(_is_strict(tool) for tool in tools))


def gemma_structural_tag(tools: list[Any], builtin: Any, tool_choice: str, *_: Any) -> Any:
    """The structural tag for Gemma's calls, for which vLLM has none.

    The tag has the JSON schema of a call's arguments in the place of the arguments in Gemma's
    notation, because xgrammar has no format for these. `constrained_calls` inserts our format.

    Args:
        tools: functions, as vLLM's registry of structural tags passes them.
        builtin: other tools, which Gemma's calls do not support.
        tool_choice: ``auto``, ``required`` or ``forced``.
    """
    # Only here: an offline process does without vLLM's tool parsers.
    from vllm.tool_parsers import structural_tag_registry as formats

    from vllm_dllm.constraints.grammar import CALL, CALL_END

    tags = [
        formats.TagFormat(
            begin=GEMMA_BEGIN + tool.function.name,
            content=formats.JSONSchemaFormat(
                json_schema=formats.get_function_parameters(tool.function)
            ),
            end=CALL_END,
        )
        for tool in tools
    ]
    if tool_choice == "auto":
        calls = formats.TriggeredTagsFormat(triggers=[CALL], tags=tags)
    else:
        calls = formats.TagsWithSeparatorFormat(
            tags=tags, separator="", at_least_one=True, stop_after_first=tool_choice == "forced"
        )
    return formats.StructuralTag(format=calls)


def constrained_calls(
    request: Any,
    structured: StructuredOutputsParams | None,
    tokenizer: Callable[[], Any],
) -> StructuredOutputsParams | None:
    """The constraint of a request with tools.

    Args:
        request: a request of vLLM's HTTP server.
        structured: the constraint that vLLM made from it.
        tokenizer: returns vLLM's tokenizer.

    Raises:
        VLLMValidationError: a call is required in a way for which vLLM makes no constraint, or the
            name of a tool cannot be written in a call.
    """
    tools = getattr(request, "tools", None)
    if not tools:
        return structured
    choice = request.tool_choice
    if getattr(choice, "type", None) == "allowed_tools" and choice.mode == "required":
        raise VLLMValidationError(
            "tool_choice of type allowed_tools is not supported with diffusion models: send the "
            'tools that are allowed, and "required".',
            parameter="tool_choice",
        )
    if _is_forced(choice) and not _comes_from_tools(structured, request):
        wanted = choice if isinstance(choice, str) else "of a named tool"
        raise VLLMValidationError(
            f"tool_choice {wanted} is not supported with diffusion models and this server's "
            "--tool-call-parser: vLLM has no structural tag for it, so a call could neither be "
            'required nor checked; send "auto", or serve with a parser such as hermes.',
            parameter="tool_choice",
        )
    if structured is None or structured.structural_tag is None:
        return structured
    from vllm_dllm.constraints.grammar import GEMMA_TOKENS, MARKS

    tag = json.loads(structured.structural_tag)
    strict = [_parameters(tool) for tool in tools if _is_strict(tool)]
    _relax(tag, [schema for schema in map(_parameters, tools) if schema not in strict])
    calls = list(_gemma_tags(tag))
    for call in calls:
        _write_as_gemma(call)
    if calls:
        found = tokenizer()
        known = found.get_vocab()
        special = [text for text in found.all_special_tokens if text not in MARKS]
        tag[GEMMA_TOKENS] = {"marks": [m for m in MARKS if m in known], "special": special}
    return replace(structured, structural_tag=json.dumps(tag))


def _gemma_tags(value: Any) -> Iterator[dict[str, Any]]:
    """The tags in a structural tag that stand for Gemma's calls."""
    parts: Iterable[Any] = value if isinstance(value, list) else ()
    if isinstance(value, dict):
        parts = value.values()
        if value.get("type") == "tag" and str(value.get("begin")).startswith(GEMMA_BEGIN):
            yield value
    for part in parts:
        yield from _gemma_tags(part)


def _write_as_gemma(tag: dict[str, Any]) -> None:
    """Give the arguments of a call Gemma's notation, in place.

    Raises:
        VLLMValidationError: the name of the tool cannot be written in a call.
    """
    from vllm_dllm.constraints.grammar import GEMMA_ARGUMENTS, LENIENT

    name = tag["begin"].removeprefix(GEMMA_BEGIN)
    if not GEMMA_NAME.fullmatch(name):
        raise VLLMValidationError(
            f"the name of a tool, {shown(name)}, is not supported with Gemma's calls: letters, "
            "digits, _, - and . are.",
            parameter="tools",
        )
    kept = {key: tag["content"][key] for key in ("json_schema", LENIENT) if key in tag["content"]}
    tag["content"] = {"type": GEMMA_ARGUMENTS, **kept}


def _is_forced(choice: Any) -> bool:
    """Whether the request requires a call, to any tool or to a named one."""
    if isinstance(choice, str) or choice is None:
        return choice == "required"
    return getattr(choice, "type", None) in ("function", "custom")


def _comes_from_tools(structured: StructuredOutputsParams | None, request: Any) -> bool:
    """Whether vLLM made a constraint from tools rather than from a format."""
    if structured is None:
        return False
    if structured.structural_tag is not None:
        return True
    # Only here: an offline process does without vLLM's tool parsers.
    from vllm.tool_parsers.utils import get_json_schema_from_tools

    calls = get_json_schema_from_tools(
        request.tool_choice, request.tools, request.parallel_tool_calls
    )
    return structured.json is not None and structured.json == calls


def _function(tool: Any) -> Any:
    """The description of the function, which is the tool itself in the Responses API."""
    return tool.function if hasattr(tool, "function") else tool


def _is_strict(tool: Any) -> bool:
    return getattr(_function(tool), "strict", None) is True


def _parameters(tool: Any) -> Any:
    return getattr(_function(tool), "parameters", None)


def _relax(value: Any, schemas: Iterable[Any]) -> None:
    """Mark the schemas of arguments that may be replaced by any object, in place."""
    from vllm_dllm.constraints.grammar import LENIENT

    if isinstance(value, list):
        for part in value:
            _relax(part, schemas)
    elif isinstance(value, dict) and value.get("type") == "tag" and "content" in value:
        content = value["content"]
        if isinstance(content, dict) and content.get("type") == "json_schema":
            if content["json_schema"] is True:
                content["json_schema"] = ANY_OBJECT  # arguments are an object, whatever is in it
            elif content["json_schema"] in schemas:
                content[LENIENT] = True
        else:
            _relax(content, schemas)
    elif isinstance(value, dict):
        for part in value.values():
            _relax(part, schemas)
