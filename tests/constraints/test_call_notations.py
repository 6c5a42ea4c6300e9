"""Calls in the notations of models: vLLM's own parsers read back what is offered, and it is valid.

For Gemma, and for every tool parser whose structural tags of vLLM have a style.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from canvas_grammar.automaton.vocabulary import Vocabulary
from canvas_grammar.grammar.json.calls import INERT, gemma_arguments, types_of
from canvas_grammar.grammar.language import Node
from canvas_grammar.grammar.marks import CALL, CALL_END, DELIMITER, Marks
from canvas_grammar.grammar.structural_tag import structural_tag
from canvas_grammar.limits import ConstraintError
from canvas_grammar_support.derivations import derives, drawn, marked
from canvas_grammar_support.helpers import LIMITS, compiled, first_window, record
from canvas_grammar_support.json_languages import validator_of
from canvas_grammar_support.schemas.corpora import real_cases
from canvas_grammar_support.schemas.strategies import schemas
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jsonschema.exceptions import best_match
from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser.gemma4 import Gemma4Parser
from vllm.tool_parsers import ToolParserManager
from vllm.tool_parsers.structural_tag_registry import get_model_structural_tag
from vllm.tool_parsers.tool_strict_level import ToolStrictLevel
from vllm.tool_parsers.utils import coerce_to_schema_type, extract_types_from_schema

from tests.support.checkpoints import TINY_GEMMA

PARSERS = {
    "qwen3_coder": "qwen_3_coder", "qwen3_xml": "qwen_3_coder", "step3p5": "qwen_3_coder",
    "mimo": "mimo", "minimax_m2": "minimax", "glm47": "glm_4_7", "glm45": "glm_4_7",
    "ling3": "glm_4_7", "deepseek_v32": "deepseek_v3_2", "deepseek_v4": "deepseek_v4",
    "deepseek_v41": "deepseek_v4_1",
}  # fmt: skip
KEYS = st.sampled_from(["a", "b", "c-d"])
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
    """What is offered: Gemma's arguments of a call, or calls after vLLM's own structural tag."""
    given = json.loads(json.dumps(schema))
    marks = Marks({}, tokenizer().all_special_tokens)
    if parser == "gemma":
        return gemma_arguments(given, marks).node
    tools = request_of(given, choice).tools
    tag = get_model_structural_tag(
        PARSERS[parser], tools, choice, False, strict_level=ToolStrictLevel.PARAMETER
    )
    assert tag is not None
    return structural_tag(tag.model_dump(), LIMITS, marks)


def read_back(parser: str, schema: Any, text: str) -> list[Any]:
    """The arguments of the calls that vLLM's parser finds in a text."""
    request = request_of(schema)
    if parser == "gemma":
        whole = f"{CALL}call:f{text}{CALL_END}"
        made = Gemma4Parser(tokenizer(), request.tools)
        calls = made.extract_tool_calls_from_content(whole, request).tool_calls
    else:
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


@pytest.mark.parametrize("parser", [*MODELS, "gemma"])
@settings(max_examples=25)
@given(st.dictionaries(KEYS, schemas(depth=2), max_size=3), st.booleans())
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


# ------------------------------------------------------------------------ Gemma alone


@pytest.mark.slow
@pytest.mark.parametrize(
    ("characters", "stride"), [(2_000, 24), pytest.param(1_000_000, 6, marks=pytest.mark.long)]
)
def test_real_schemas(characters: int, stride: int) -> None:
    """Of at most so many characters; a large schema takes seconds."""
    found = 0
    for case in real_cases()[::stride]:
        if len(json.dumps(case.schema)) > characters:
            continue
        if isinstance(case.schema, dict) and case.schema.get("type") == "object":
            try:
                node = written("gemma", case.schema)
            except ConstraintError:
                continue
            found += check("gemma", case.schema, node, 2)
    assert found > 400 / stride or not real_cases()


@given(schemas())
def test_types_are_found_as_vllm_finds_them(schema: Any) -> None:
    assert types_of(schema) == frozenset(extract_types_from_schema(schema))


@given(st.text() | st.sampled_from(["null", "NULL ", "-1", "1_0", "nan", "Infinity", "{}", "true"]))
def test_strings_that_could_be_something_else_are_left_out(text: str) -> None:
    if INERT.fullmatch(text):
        assert coerce_to_schema_type(text, TYPES) is text


TYPES = ["null", "integer", "number", "boolean", "object", "array", "string"]
PERSON = record(
    name={"type": "string", "minLength": 1},
    rows={"type": "array", "items": ROW, "maxItems": 2},
    who={"type": "object", "properties": {"age": {"type": ["integer", "null"]}}},
)
UNIQUE = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
CONSTANT = {"b": [1, "c"]}
FOLLOWED = {"properties": {"b": {"items": {"type": "integer"}}}}


# A string is written 'text' here.
@pytest.mark.parametrize(
    ("schema", "fit", "others"),
    [
        (PERSON,
         ["{name:'A \"b\", {c}\n',rows:[1,9],who:{age:null}}", "{name:'é',rows:[],who:{}}"],
         ["{name:A,rows:[],who:{}}", "{name:'',rows:[],who:{}}", "{name:'a',rows:[0],who:{}}",
          "{name:'a<|turn>',rows:[],who:{}}", "{name: 'a',rows:[],who:{}}"]),
        (record(a={"type": ["string", "integer"]}),
         ["{a:3}", "{a:'b'}", "{a:''}"], ["{a:'3'}", "{a:' 3'}", "{a:'Nullable'}"]),
        (record(a={"enum": ["x", "1", 1, None]}), ["{a:1}", "{a:null}", "{a:'x'}"], ["{a:'1'}"]),
        (record(a={"type": "number", "minimum": 0.5}), ["{a:0.5}", "{a:2}"], ["{a:0.4}"]),
        (record(a={"const": "x", "type": "string"}), ["{a:'x'}"], ["{a:'y'}"]),
        (record(a={"const": {"b": [1]}, **FOLLOWED}), ["{a:{b:[1]}}"], ["{a:{b:['1']}}"]),
        ({"type": "object"}, ["{}", "{a:'b',c:[{}]}"], ["{a:1}", "{a b:{}}", "{a:true}"]),
        ({"type": "object", "properties": {"a": True}, "additionalProperties": False},
         ["{a:'1'}", "{a:{}}", "{}"], ["{a:1}", "{b:'1'}"]),
        ({"properties": {"a": UNIQUE}}, ["{a:[]}", "{a:['b']}"], ["3", "[]", "{a:['b','c']}"]),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_written(schema: Any, fit: list[str], others: list[str]) -> None:
    node = written("gemma", schema)
    for text in fit:
        assert derives(node, text.replace("'", DELIMITER)), text
    for text in others:
        assert not derives(node, text.replace("'", DELIMITER)), text
    assert check("gemma", schema, node, 10)


@pytest.mark.parametrize(
    "schema",
    [
        record(**{"a:b": ROW}),
        {**record(a={"$ref": "#/$defs/a"}), "$defs": {"a": ROW}},
        record(a=UNIQUE | {"minItems": 2}),
        record(a={"const": CONSTANT, "type": "object"}),
        {"type": "array"},
    ],
    ids=["name", "reference", "unique", "constant", "no object"],
)
def test_what_cannot_be_written(schema: Any) -> None:
    with pytest.raises(ConstraintError, match=r"Gemma's notation|uniqueItems"):
        written("gemma", schema)


TOKENS = (CALL, CALL_END, DELIMITER)


def with_marks(*named: str) -> Vocabulary:
    """Bytes, and special tokens after them."""
    added = [*named, "<eos>", "<|turn>"]
    return Vocabulary.read(
        {
            "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}]},
            "model": {"vocab": {f"<0x{n:02X}>": n for n in range(256)}},
            "added_tokens": [
                {"id": 256 + n, "content": text, "special": True} for n, text in enumerate(added)
            ],
        },
        256 + len(added),
        [256 + added.index("<eos>")],
    )


def tag(choice: str) -> dict[str, Any]:
    schema = record(a={"const": "x", "type": "string"})
    content = {"type": "json_schema", "style": "gemma", "json_schema": schema}
    call = {"type": "tag", "begin": f"{CALL}call:f", "content": content, "end": CALL_END}
    calls: dict[str, Any] = {"type": "triggered_tags", "triggers": [CALL], "tags": [call]}
    if choice == "required":
        calls = {"type": "tags_with_separator", "tags": [call], "separator": ""}
        calls["at_least_one"] = True
    return {"format": calls}


CALLED = f"{CALL}call:f{{a:{DELIMITER}x{DELIMITER}}}{CALL_END}"


def test_marks_are_tokens() -> None:
    found = first_window(compiled("structural_tag", tag("required"), with_marks(*TOKENS)))
    plain = CALLED
    for token in TOKENS:
        plain = plain.replace(token, "")
    tokens = sum(CALLED.count(token) for token in TOKENS)
    assert int(found.automaton.distance[0]) == len(plain) + tokens + 1
    spelled = first_window(compiled("structural_tag", tag("required"), with_marks()))
    assert int(spelled.automaton.distance[0]) == len(CALLED) + 1


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_calls_in_free_text(choice: str) -> None:
    node = structural_tag(tag(choice), LIMITS)
    optional = choice == "auto"
    assert derives(node, CALLED) and derives(node, CALLED + CALLED)
    assert derives(node, f"Hello {CALLED}") is optional and derives(node, "") is optional
    for text in (CALL, CALLED[:-1], CALLED.replace("call:f", "call:g")):
        assert not derives(node, text), text
    vocabulary = with_marks(*TOKENS)
    marks = Marks(vocabulary.added, vocabulary.special)
    with_tokens = structural_tag(tag(choice), LIMITS, marks)
    assert not derives(with_tokens, CALLED)
    call = CALLED
    for token in TOKENS:
        call = call.replace(token, marked(marks.numbers[vocabulary.added[token]]))
    assert derives(with_tokens, call)
    assert derives(with_tokens, f"a < b {call} c") is optional
