"""Calls between tags: what is offered is read back by vLLM's own parsers, and satisfies the schema.

For every tool parser whose structural tags of vLLM have a style.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from canvas_grammar.grammar.language import Node
from canvas_grammar.grammar.marks import Marks
from canvas_grammar.grammar.structural_tag import structural_tag
from canvas_grammar.limits import ConstraintError
from canvas_grammar_support.derivations import derives
from canvas_grammar_support.helpers import LIMITS, record
from canvas_grammar_support.json_languages import drawn, validator_of
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jsonschema.exceptions import best_match
from test_json_schema_random import schemas
from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers import ToolParserManager
from vllm.tool_parsers.structural_tag_registry import get_model_structural_tag
from vllm.tool_parsers.tool_strict_level import ToolStrictLevel

from tests.support.checkpoints import TINY_GEMMA

PARSERS = {
    "qwen3_coder": "qwen_3_coder", "qwen3_xml": "qwen_3_coder", "step3p5": "qwen_3_coder",
    "mimo": "mimo", "minimax_m2": "minimax", "glm47": "glm_4_7", "glm45": "glm_4_7",
    "ling3": "glm_4_7", "deepseek_v32": "deepseek_v3_2", "deepseek_v4": "deepseek_v4",
    "deepseek_v41": "deepseek_v4_1",
}  # fmt: skip
MODELS = ["qwen3_coder", "mimo", "minimax_m2", "glm47", "deepseek_v32", "deepseek_v41"]


@cache
def tokenizer() -> Any:
    """One without the markers, so that they are spelled; its special tokens are dropped."""
    return AutoTokenizer.from_pretrained(TINY_GEMMA)


def request_of(schema: Any, choice: Any = "required") -> ChatCompletionRequest:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    body = {"messages": [], "tools": [tool], "tool_choice": choice}
    return ChatCompletionRequest.model_validate(body)


def written(parser: str, schema: Any, choice: Any = "required") -> Node:
    """What is offered for vLLM's own structural tag."""
    request = request_of(json.loads(json.dumps(schema)), choice)
    tag = get_model_structural_tag(
        PARSERS[parser], request.tools, choice, False, strict_level=ToolStrictLevel.PARAMETER
    )
    assert tag is not None
    return structural_tag(tag.model_dump(), LIMITS, Marks({}, tokenizer().all_special_tokens))


def read_back(parser: str, schema: Any, text: str) -> list[Any]:
    """The arguments of the calls that vLLM's parser finds in a text."""
    request = request_of(schema)
    found = ToolParserManager.get_tool_parser(parser)(tokenizer(), request.tools)
    calls = found.extract_tool_calls(text, request).tool_calls
    assert calls and all(call.function.name == "f" for call in calls), text
    return [json.loads(call.function.arguments) for call in calls]


def check(parser: str, schema: Any, node: Node, count: int) -> int:
    """Draw texts, let vLLM read them and judge what it read; returns how many."""
    validator = validator_of(schema)
    texts = drawn(node, count)
    for text in texts:
        for value in read_back(parser, schema, text):
            error = best_match(validator.iter_errors(value))
            # The validator divides doubles: 0.07 is no multiple of 0.01 to it.
            assert error is None or error.validator == "multipleOf", (schema, text, value, error)
    return len(texts)


ROW: dict[str, Any] = {"type": "integer", "minimum": 1, "maximum": 9}
NESTED = record(
    name={"type": "string", "minLength": 1},
    kind={"enum": ["a", "\nb\n", 3]},
    rows={"type": "array", "items": ROW, "maxItems": 2},
    who={"type": "object", "properties": {"age": {"type": ["integer", "null"]}, "x": {}}},
    free={"type": ["string", "boolean"]},
)


@pytest.mark.parametrize("parser", PARSERS)
def test_a_call_is_read_back(parser: str) -> None:
    assert check(parser, NESTED, written(parser, NESTED), 40) == 40
    for schema in ({"type": "object"}, {}, {"type": "object", "minProperties": 1}):
        assert check(parser, schema, written(parser, schema), 20)


@pytest.mark.parametrize("parser", MODELS)
@settings(max_examples=60)
@given(st.dictionaries(st.sampled_from(["a", "b", "c-d"]), schemas(), max_size=3), st.booleans())
def test_random_schemas(parser: str, properties: dict[str, Any], all_required: bool) -> None:
    schema = {"type": "object", "properties": properties}
    if all_required:
        schema["required"] = list(properties)
    try:
        node = written(parser, schema)
    except ConstraintError:
        assume(False)
    check(parser, schema, node, 4)


# Each parser's call of a function with the arguments {"a": "x < y", "b": [1]}.
CALLS = {
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=a>\nx < y\n</parameter>\n"
    "<parameter=b>\n[1]\n</parameter>\n</function>\n</tool_call>",
    "mimo": "<tool_call><function=f><parameter=a>x < y</parameter><parameter=b>[1]</parameter>"
    "</function></tool_call>",
    "minimax_m2": '\n<minimax:tool_call>\n<invoke name="f">\n'
    '<parameter name="a">x < y</parameter>\n<parameter name="b">[1]</parameter>\n'
    "</invoke>\n</minimax:tool_call>",
    "glm47": "<tool_call>f<arg_key>a</arg_key><arg_value>x < y</arg_value>"
    "<arg_key>b</arg_key><arg_value>[1]</arg_value></tool_call>",
    "deepseek_v32": '\n\n<|DSML|function_calls>\n<|DSML|invoke name="f">\n'
    '<|DSML|parameter name="a" string="true">x < y</|DSML|parameter>\n'
    '<|DSML|parameter name="b" string="false">[1]</|DSML|parameter>\n'
    "</|DSML|invoke>\n</|DSML|function_calls>",
    "deepseek_v41": '\n\n<|DSML| calls>\n<|DSML| invoke name="f">\n'
    '<|DSML| parameter name="a" string="true">x < y</|DSML| parameter>\n'
    '<|DSML| parameter name="b" string="false">[1]</|DSML| parameter>\n'
    "</|DSML| invoke>\n</|DSML| calls>",
}
LIST = {"type": "array", "items": {"type": "integer"}}


@pytest.mark.parametrize("parser", MODELS)
def test_what_models_are_trained_to_write(parser: str) -> None:
    schema = record(a={"type": "string"}, b=LIST)
    call = CALLS[parser].replace("|DSML|", "\uff5cDSML\uff5c")
    node = written(parser, schema)
    assert derives(node, call)
    assert read_back(parser, schema, call) == [{"a": "x < y", "b": [1]}]
    for wrong in (call.replace("[1]", '["1"]'), call.replace("[1]", "1"), call[:-1], "Hello.",
                  call.replace("x < y", "</parameter> </tool_call> \uff5cDSML\uff5c")):  # fmt: skip
        assert not derives(node, wrong), wrong
    free = written(parser, schema, "auto")
    assert derives(free, f"Hello. {call.strip()}") and derives(free, "Hello.")
    assert not derives(free, call.strip()[:-1])


@pytest.mark.parametrize("parser", MODELS)
def test_no_text_takes_the_place_of_a_value(parser: str) -> None:
    """What vLLM's parser would take for another type, or for the end, is not offered."""
    call = CALLS[parser].replace("|DSML|", "\uff5cDSML\uff5c")

    def offers(a: Any, text: str) -> bool:
        return derives(written(parser, record(a=a, b=LIST)), call.replace("x < y", text))

    both = {"type": ["string", "integer"], "minimum": 5}
    assert offers(both, "x < y") and not offers(both, "1")
    assert not offers({"type": "string"}, "a<eos>b"), "vLLM drops special tokens"
    assert offers({"type": "string", "maxLength": 5}, "x < y")
    assert not offers({"type": "string", "maxLength": 4}, "x < y")
    with pytest.raises(ConstraintError, match="read back"):
        written(parser, record(a={"$ref": "#/$defs/a"}) | {"$defs": {"a": LIST}})
