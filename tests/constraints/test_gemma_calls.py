"""Gemma's calls: what is offered is read back by vLLM's own parser, and satisfies the schema."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from canvas_grammar.automaton.vocabulary import Vocabulary
from canvas_grammar.grammar.json.gemma import INERT, gemma_arguments, types_of
from canvas_grammar.grammar.language import Node
from canvas_grammar.grammar.marks import CALL, CALL_END, DELIMITER, Marks
from canvas_grammar.grammar.structural_tag import structural_tag
from canvas_grammar.limits import ConstraintError
from canvas_grammar_support.derivations import derives, marked
from canvas_grammar_support.helpers import LIMITS, compiled, first_window, record
from canvas_grammar_support.json_languages import drawn, validator_of
from canvas_grammar_support.schemas.corpora import real_cases
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jsonschema.exceptions import best_match
from test_json_schema_random import schemas
from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser.gemma4 import Gemma4Parser
from vllm.tool_parsers.utils import coerce_to_schema_type, extract_types_from_schema

from tests.support.checkpoints import TINY_GEMMA

TYPES = ["null", "integer", "number", "boolean", "object", "array", "string"]
ROW: dict[str, Any] = {"type": "integer", "minimum": 1, "maximum": 9}


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TINY_GEMMA)


def written(schema: Any) -> Node:
    given = json.loads(json.dumps(schema))
    return gemma_arguments(given, Marks({}, tokenizer().all_special_tokens)).node


def read_back(schema: Any, arguments: str) -> Any:
    """The arguments that vLLM's parser finds in the text of a call."""
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    request = ChatCompletionRequest.model_validate({"messages": [], "tools": [tool]})
    parser = Gemma4Parser(tokenizer(), request.tools)
    text = f"{CALL}call:f{arguments}{CALL_END}"
    (call,) = parser.extract_tool_calls_from_content(text, request).tool_calls
    assert call.function.name == "f"
    return json.loads(call.function.arguments)


def check(schema: Any, node: Node, count: int) -> int:
    """Draw texts, let vLLM read them and judge what it read; returns how many."""
    validator = validator_of(schema)
    texts = drawn(node, count)
    for text in texts:
        value = read_back(schema, text)
        error = best_match(validator.iter_errors(value))
        # The validator divides doubles: 0.07 is no multiple of 0.01 to it.
        assert error is None or error.validator == "multipleOf", (schema, text, value, error)
    return len(texts)


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
                node = written(case.schema)
            except ConstraintError:
                continue
            found += check(case.schema, node, 2)
    assert found > 400 / stride or not real_cases()


@settings(max_examples=150)
@given(st.dictionaries(st.sampled_from(["a", "b", "c d"]), schemas(), max_size=3), st.booleans())
def test_random_schemas(properties: dict[str, Any], all_required: bool) -> None:
    schema = {"type": "object", "properties": properties}
    if all_required:
        schema["required"] = list(properties)
    try:
        node = written(schema)
    except ConstraintError:
        assume(False)
    check(schema, node, 6)


@given(schemas())
def test_types_are_found_as_vllm_finds_them(schema: Any) -> None:
    assert types_of(schema) == frozenset(extract_types_from_schema(schema))


@given(st.text() | st.sampled_from(["null", "NULL ", "-1", "1_0", "nan", "Infinity", "{}", "true"]))
def test_strings_that_could_be_something_else_are_left_out(text: str) -> None:
    if INERT.fullmatch(text):
        assert coerce_to_schema_type(text, TYPES) is text


NESTED = record(
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
        (NESTED,
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
    node = written(schema)
    for text in fit:
        assert derives(node, text.replace("'", DELIMITER)), text
    for text in others:
        assert not derives(node, text.replace("'", DELIMITER)), text
    assert check(schema, node, 10)


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
        written(schema)


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
