"""Calls of tools, from vLLM's own structural tags to the texts that they may be."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from canvas_grammar.grammar.language import Node
from canvas_grammar.grammar.structural_tag import structural_tag
from canvas_grammar.limits import ConstraintError
from canvas_grammar_support.derivations import derives
from canvas_grammar_support.helpers import LIMITS, record
from openai.types.responses import FunctionTool, ToolChoiceFunction
from openai.types.responses.tool_choice_allowed import ToolChoiceAllowed
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionNamedToolChoiceParam,
    ChatCompletionRequest,
    ChatCompletionToolsParam,
)
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.tool_parsers.structural_tag_registry import get_model_structural_tag
from vllm.tool_parsers.tool_strict_level import ToolStrictLevel
from vllm.tool_parsers.utils import get_json_schema_from_tools

from vllm_dllm.frontend.http_request import HttpRequest, constraining_field
from vllm_dllm.frontend.tool_calls import asks_for_calls, constrained_calls

SEAT = record(row={"type": "integer", "minimum": 1, "maximum": 9})
UNSUPPORTED = record(
    a={"type": "array", "items": {"type": "string"}, "uniqueItems": True, "minItems": 7}
)
CALL = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'


def tool(name: str, parameters: Any, strict: bool | None = None) -> ChatCompletionToolsParam:
    function = {"name": name, "parameters": parameters}
    if strict is not None:
        function["strict"] = strict
    return ChatCompletionToolsParam.model_validate({"type": "function", "function": function})


def asked(tools: list[Any], choice: Any) -> dict[str, Any]:
    """The structural tag that is compiled for a request to a server with the parser of Hermes."""
    tag = get_model_structural_tag(
        "hermes", tools, choice, reasoning=False, strict_level=ToolStrictLevel.PARAMETER
    )
    assert tag is not None
    given = StructuredOutputsParams(structural_tag=tag.model_dump_json())
    request = SimpleNamespace(tools=tools, tool_choice=choice)
    found = constrained_calls(request, given)
    assert found is not None
    return json.loads(found.structural_tag)


def language(tools: list[Any], choice: Any) -> Node:
    return structural_tag(asked(tools, choice), LIMITS)


@pytest.mark.parametrize("strict", [None, False, True])
def test_auto_is_free_text_and_calls_that_are_finished(strict: bool | None) -> None:
    texts = language([tool("book", SEAT, strict)], "auto")
    call = CALL.format("book", '{"row": 3}')
    for text in ("", "Hello.", call, f"Let me see. {call}", f"a{call}b{call}c", "a <tool"):
        assert derives(texts, text), text
    for text in ("<tool_call>", call[:-1], CALL.format("book", '{"row": 0}'), f"{call}<tool_call>",
                 CALL.format("look", '{"row": 3}'), CALL.format("book", "3")):  # fmt: skip
        assert not derives(texts, text), text


SEAT_OF_RESPONSES = FunctionTool(type="function", name="book", parameters=SEAT, strict=None)


@pytest.mark.parametrize("seat", [tool("book", SEAT), SEAT_OF_RESPONSES], ids=["chat", "responses"])
def test_a_required_call_is_there(seat: Any) -> None:
    texts = language([seat], "required")
    call = CALL.format("book", '{"row": 3}')
    assert derives(texts, call) and derives(texts, call + call)
    assert not derives(texts, "") and not derives(texts, "Hello. " + call)


def test_a_strict_tool_is_refused_where_its_schema_is() -> None:
    with pytest.raises(ConstraintError, match="uniqueItems"):
        language([tool("a", UNSUPPORTED, strict=True)], "auto")
    with pytest.raises(ConstraintError, match="uniqueItems"):
        language([tool("a", UNSUPPORTED, strict=True), tool("b", UNSUPPORTED)], "auto")


def test_other_tools_may_be_given_any_object_instead() -> None:
    tools = [tool("a", UNSUPPORTED), tool("b", SEAT, strict=True), tool("c", None)]
    tags = asked(tools, "auto")["format"]["tags"]
    lenient, strict, without = (part["content"] for part in tags[::2])
    assert lenient["or_any_object"] is True and "or_any_object" not in strict
    assert without["json_schema"] in ({"type": "object"}, {"type": "object", "properties": {}})


def test_requests_without_tools_keep_their_constraint() -> None:
    given = StructuredOutputsParams(regex="a")
    for request in (SimpleNamespace(tools=None), SimpleNamespace()):
        params = SamplingParams(structured_outputs=given)
        assert HttpRequest(request=request).constraint(params) is given


def test_allowed_tools_cannot_be_required() -> None:
    choice = ToolChoiceAllowed(type="allowed_tools", mode="required", tools=[])
    request = SimpleNamespace(tools=[tool("a", SEAT)], tool_choice=choice)
    with pytest.raises(VLLMValidationError, match="allowed_tools"):
        constrained_calls(request, None)


NAMED = ChatCompletionNamedToolChoiceParam.model_validate({"function": {"name": "book"}})
FUNCTION = ToolChoiceFunction(type="function", name="book")


@pytest.mark.parametrize(
    "choice", ["required", NAMED, FUNCTION], ids=["required", "chat", "responses"]
)
@pytest.mark.parametrize(
    "given", [None, StructuredOutputsParams(json_object=True)], ids=["", "json"]
)
def test_calls_that_vllm_does_not_constrain_cannot_be_required(choice: Any, given: Any) -> None:
    tools = [SEAT_OF_RESPONSES] if choice is FUNCTION else [tool("book", SEAT)]
    request = SimpleNamespace(tools=tools, tool_choice=choice, parallel_tool_calls=None)
    with pytest.raises(VLLMValidationError, match="--tool-call-parser"):
        constrained_calls(request, given)
    calls = StructuredOutputsParams(json=get_json_schema_from_tools(choice, tools, None))
    assert constrained_calls(request, calls) is calls


@pytest.mark.parametrize("choice", ["auto", "none", None])
def test_calls_that_vllm_does_not_constrain_may_be_optional(choice: Any) -> None:
    request = SimpleNamespace(tools=[tool("book", SEAT)], tool_choice=choice)
    assert constrained_calls(request, None) is None


FREE = {"name": "book", "parameters": SEAT}


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({}, False),
        ({"response_format": {"type": "text"}}, False),
        ({"vllm_xargs": {"diffusion_constraint_depth": 20}}, True),
        ({"tool_choice": "none"}, None),
        ({"tool_choice": "required"}, None),
        ({"response_format": {"type": "json_object"}}, None),
        ({"structured_outputs": {"regex": "a"}}, None),
        ({"strict": True}, True),
    ],
    ids=str,
)
def test_what_asks_for_a_constraint(fields: dict[str, Any], found: bool | None) -> None:
    function = FREE | {name: fields[name] for name in fields if name == "strict"}
    fields = {name: fields[name] for name in fields if name != "strict"}
    chat = {"messages": [], "tools": [{"type": "function", "function": function}]}
    made: Any = ChatCompletionRequest.model_validate(chat | fields)
    assert asks_for_calls(made, constraining_field(made, "")) == found
    if "response_format" in fields:
        fields = {"text": {"format": fields["response_format"]}}
    response = {"input": "", "tools": [{"type": "function", **function}]}
    made = ResponsesRequest.model_validate(response | fields)
    assert asks_for_calls(made, constraining_field(made, "/v1/responses")) == found
