"""Tool calls: what vLLM's structural tags for them require, and what they require here.

vLLM constrains the calls of a tool by the schema of its parameters if the tool is strict, or if the
server's ``--tool-strict-level`` is ``parameter``; `vllm_seams.http_endpoints` makes that the
default. So the schema of a tool that is not strict is followed, too. If such a schema is not
supported, its request is not refused: the arguments may then be any object.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from canvas_grammar.grammar.marks import GEMMA, LENIENT
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.sampling_params import StructuredOutputsParams
from vllm.tool_parsers import ToolParserManager
from vllm.tool_parsers.utils import get_json_schema_from_tools

from vllm_dllm.frontend.refusal import STRICT, refused
from vllm_dllm.ranges import shown
from vllm_dllm.settings.parsing import CONSTRAINT_OPTIONS
from vllm_dllm.settings.resolution import REQUEST_PREFIX

logger = init_logger("vllm.dllm")
ANY_OBJECT = {"type": "object"}
GEMMA_BEGIN = "<|tool_call>call:"
GEMMA_NAME = re.compile(r"[\w.-]+", re.ASCII)


def asks_for_calls(request: Any, constrained_by: str) -> bool | None:
    """Whether a request that only its optional tools constrain asks for this constraint.

    It does if a tool is strict or it sets an option of constraints; otherwise the server has added
    the constraint. None stands for a request with a required call or a format of its own. A
    constraint next to a required call, by whose schema vLLM would replace it, is refused.
    `constrained_by` is the field from `http_request.constraining_field`.
    """
    if request.structured_outputs is not None and _is_forced(request.tool_choice):
        raise refused(
            "structured_outputs",
            "and a required tool are two constraints on one answer; remove structured_outputs, or "
            'send tool_choice "auto" or "none"',
        )
    optional = request.tool_choice == "auto" and constrained_by in ("", STRICT)
    if not optional or request.structured_outputs is not None:
        return None
    options = request.vllm_xargs or {}
    by_option = any(REQUEST_PREFIX + name in options for name in CONSTRAINT_OPTIONS)
    return by_option or constrained_by == STRICT


def check_parser(name: str) -> None:
    """Log a warning if calls for the server's ``--tool-call-parser`` cannot be required."""
    parser = ToolParserManager.get_tool_parser(name)
    if not parser.supports_required_and_named and parser.structural_tag_model is None:
        logger.warning(
            'dllm: --tool-call-parser %s: tool_choice "required" and named tools are refused, '
            "because vLLM has no structural tag for its calls; calls are optional, and parsed but "
            "not checked.",
            name,
        )


def constrained_calls(
    request: Any, structured: StructuredOutputsParams | None
) -> StructuredOutputsParams | None:
    """The constraint of an HTTP request with tools, given the one that vLLM made from it.

    Refused are a call that is required in a way for which vLLM makes no constraint, and a tool
    whose name cannot be written in a call.
    """
    tools, choice = request.tools, request.tool_choice
    if getattr(choice, "type", None) == "allowed_tools" and choice.mode == "required":
        raise refused(
            "tool_choice",
            "of type allowed_tools is not supported with diffusion models: send the tools that are "
            'allowed, and "required"',
        )
    if _is_forced(choice) and not _comes_from_tools(structured, request):
        wanted = choice if isinstance(choice, str) else "of a named tool"
        raise refused(
            "tool_choice",
            f"{wanted} is not supported with diffusion models and this server's --tool-call-parser:"
            " vLLM has no structural tag for it, so a call could neither be required nor checked; "
            'send "auto", or serve with a parser such as hermes',
        )
    if structured is None or structured.structural_tag is None:
        return structured
    whole = json.loads(structured.structural_tag)
    strict = [_parameters(tool) for tool in tools if _is_strict(tool)]
    for tag in _tags(whole):
        content = tag["content"]
        if content["json_schema"] is True:
            content["json_schema"] = ANY_OBJECT  # arguments are an object, whatever is in it
        elif content["json_schema"] in map(_parameters, tools) and (
            content["json_schema"] not in strict
        ):
            content[LENIENT] = True
        if str(tag.get("begin")).startswith(GEMMA_BEGIN):
            name = tag["begin"].removeprefix(GEMMA_BEGIN)
            if not GEMMA_NAME.fullmatch(name):
                if not strict and not _is_forced(choice):
                    return None
                raise VLLMValidationError(
                    f"the name of a tool, {shown(name)}, is not supported with Gemma's calls: "
                    "letters, digits, _, - and . are.",
                    parameter="tools",
                )
            content["style"] = GEMMA
    return replace(structured, structural_tag=json.dumps(whole))


def _tags(value: Any) -> Iterator[dict[str, Any]]:
    """The tags in a structural tag whose content is a JSON schema: the arguments of calls."""
    if isinstance(value, list):
        for part in value:
            yield from _tags(part)
    elif isinstance(value, dict):
        content = value.get("content") if value.get("type") == "tag" else None
        if isinstance(content, dict) and content.get("type") == "json_schema":
            yield value
        else:
            yield from _tags(list(value.values()))


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
