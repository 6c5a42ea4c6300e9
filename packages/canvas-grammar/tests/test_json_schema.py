"""JSON schemas: what is offered validates with an independent validator, the rest is refused."""

from __future__ import annotations

import json
import re
from datetime import datetime
from typing import Any

import jsonschema
import pytest
from canvas_grammar.automaton.compilation import Constraint, constraint_language
from canvas_grammar.grammar.json.subschemas import SUPPORTED
from canvas_grammar.limits import ConstraintError
from canvas_grammar_support.derivations import derives
from canvas_grammar_support.helpers import STRING, dumped, record
from canvas_grammar_support.json_languages import LIMITS, drawn, language, offers, refusal
from test_json_keywords import CASES as KEYWORD_CASES

LINKED = {
    "$defs": {"node": record(value={"type": "integer"}) | {"properties": {
        "value": {"type": "integer"},
        "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}}},
    "$ref": "#/$defs/node",
}  # fmt: skip

# (schema, texts that it offers, texts that it does not)
CASES: list[tuple[Any, list[str], list[str]]] = [
    (STRING, ['"ab"', '""', r'"\n\"\\\u001f"', '"é\U0001f600"'], ['"a', '"\n"', r'"\x"', "ab"]),
    ({"type": "string", "minLength": 1, "maxLength": 2},
     ['"a"', '"é日"', r'"\""'], ['""', '"abc"']),
    ({"type": "string", "pattern": "^[a-z]+$"}, ['"ab"'], ['""', '"a1"', '"A"']),
    ({"type": "string", "pattern": "b|^c"}, ['"abc"', '"b"', '"cx"', '"b\\n"'], ['"xc"', '""']),
    ({"type": "string", "pattern": r'^"\\\n$'}, [r'"\"\\\n"'], ['"n"']),
    ({"type": "string", "format": "date"}, ['"2024-02-29"'], ['"2023-02-29"', '"2024-13-01"']),
    ({"type": "string", "format": "time"}, ['"23:59:59Z"', '"01:02:03.5+02:00"'], ['"24:00:00Z"']),
    ({"type": "string", "format": "date-time"}, ['"2024-02-29T00:00:00Z"'], ['"2024-02-29"']),
    ({"type": "string", "format": "ipv4"}, ['"127.0.0.1"'], ['"256.0.0.1"', '"1.2.3"']),
    ({"type": "string", "format": "email"}, ['"a.b@c-d.org"'], ['"a@b"', '"@c.d"', '"a..b@c.d"']),
    ({"type": "string", "format": "uuid"},
     ['"12345678-1234-1234-1234-123456789abc"'], ['"12345678"']),
    ({"type": "integer"}, ["0", "-1", "120"], ["01", "1.0", "+1", "1234567890123456"]),
    ({"type": "integer", "minimum": -3, "exclusiveMaximum": 12}, ["-3", "0", "11"], ["-4", "12"]),
    ({"type": "integer", "minimum": 0.5, "maximum": 2.5}, ["1", "2"], ["0", "3"]),
    ({"type": "number"}, ["0", "-1.5e-3", "2E5"], [".5", "1.", "1e999", "--1"]),
    ({"type": "number", "minimum": 0, "exclusiveMaximum": 2}, ["0", "1.999", "-0"], ["2", "-0.1"]),
    ({"type": "number", "exclusiveMinimum": 0}, ["0.1", "1"], ["0", "0.0", "-1", "-0.5"]),
    ({"type": "boolean"}, ["true", "false"], ["True", "1"]),
    ({"type": ["null", "boolean"]}, ["null", "true"], ["0"]),
    ({"enum": ["a", 1, None, {"x": [1]}]}, ['"a"', "1", "null", '{"x": [1]}'], ["2"]),
    ({"type": "integer", "enum": ["a", 1, 2.0, True]}, ["1", "2"], ['"a"', "true"]),
    ({"const": "é"}, ['"é"'], ['"e"']),
    ({"type": "array", "items": STRING}, ["[]", '["a"]', '["a","b"]', '[ "a", "b" ]'], ['["a",]']),
    ({"type": "array", "items": {"type": "null"}, "minItems": 1, "maxItems": 2},
     ["[null]", "[null, null]"], ["[]", "[null,null,null]"]),
    ({"type": "array", "items": False}, ["[]"], ["[null]"]),
    ({"type": "array", "items": STRING, "maxItems": 0}, ["[]"], ['["a"]']),
    ({"type": "array", "prefixItems": [{"type": "null"}, STRING], "items": {"type": "boolean"}},
     ["[]", "[null]", '[null, "a"]', '[null,"a",true]'], ['["a"]', '[null,"a","b"]']),
    (record(a={"type": "null"}, b=STRING), ['{"a": null, "b": "x"}', '{ "a":null,"b":"x" }'],
     ['{"b": "x", "a": null}', '{"a": null}', "{}"]),
    ({"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"},
                                       "c": {"type": "null"}}, "required": ["b"]},
     ['{"b":null}', '{"a":null,"b":null}', '{"b":null,"c":null}', '{"a":null,"b":null,"c":null}',
      '{"b":null,"d":[1]}'],
     ["{}", '{"a":null}', '{,"b":null}', '{"b":null,}', '{"a":null,"c":null}',
      '{"b":null,"d":[1],"a":1}']),
    ({"properties": {"a": {"type": "null"}, "b": {"type": "null"}}},
     ["{}", '{"a":null}', '{"b":null}', '{"a":null,"b":null}', "1"], ['{"b":null,"a":null}']),
    ({"type": "object", "properties": {}}, ["{}", '{"a":1}'], ["1"]),
    ({"type": "object", "additionalProperties": False}, ["{}"], ['{"a":1}']),
    ({"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 2},
     ["{}", '{"x":true}', '{"x":true,"":false}'], ['{"x":1}', '{"x":true,"y":true,"z":true}']),
    ({"anyOf": [{"type": "null"}, STRING]}, ["null", '"x"'], ["1"]),
    ({"oneOf": [{"type": "null"}, STRING]}, ["null", '"x"'], ["1"]),
    ({"oneOf": [record(kind={"const": "a"}), record(kind={"const": "b"}, x={"type": "null"})]},
     ['{"kind":"a"}', '{"kind":"b","x":null}'], ['{"kind":"b"}']),
    ({"allOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": {"type": "null"}}}, ["null"], ["1"]),
    ({"type": "array", "minItems": 1, "items": {"type": "object", "anyOf": [
        {"properties": {"name": {"type": "string", "enum": ["f"]},
                        "parameters": {"type": "object", "properties": {}}},
         "required": ["name", "parameters"]}]}},
     ['[{"name": "f", "parameters": {}}]'], ["[]"]),
    (LINKED, ['{"value":1}', '{"value":1,"next":{"value":2,"next":null}}'], ['{"next":null}']),
    ({"type": "null", "title": "x", "description": "y", "default": 3}, ["null"], []),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), CASES)
def test_offered_and_not(schema: Any, good: list[str], bad: list[str]) -> None:
    found = language(schema)
    assert [text for text in good if not derives(found, text)] == []
    assert [text for text in bad if derives(found, text)] == []


@pytest.mark.parametrize("schema", [case[0] for case in CASES])
def test_whatever_is_offered_validates(schema: Any) -> None:
    """Texts drawn from the automaton itself, checked by `jsonschema` with its formats."""
    checker = jsonschema.FormatChecker(["date", "ipv4", "email", "uuid"])
    validator = jsonschema.Draft202012Validator(schema, format_checker=checker)
    for text in drawn(language(schema), 40):
        validator.validate(json.loads(text))


def test_times_are_times() -> None:
    """`jsonschema` alone checks no times of RFC 3339."""
    for name in ("time", "date-time"):
        found = language({"type": "string", "format": name})
        for text in drawn(found, 200):
            moment = json.loads(text).replace("Z", "+00:00")
            datetime.fromisoformat(moment if name == "date-time" else f"2024-02-29T{moment}")


def test_every_supported_keyword_is_tried_somewhere() -> None:
    """A keyword without a case here is one of `test_json_keywords`."""
    text = "".join(dumped(case[0]) for case in CASES) + dumped([case[0] for case in KEYWORD_CASES])
    tried = set(re.findall(r'"([$a-zA-Z]+)":', text))
    assert set(SUPPORTED) - tried <= {"$recursiveRef", "$dynamicRef"}, "see test_json_drafts"


def test_a_character_that_a_pattern_excludes_is_not_offered() -> None:
    """U+0000 too: it stands only in strings without a pattern, so no pattern may require it."""
    schema = {"type": "string", "pattern": r"^[^\x00]$"}
    found = language(schema)
    for code in range(0x7F):
        text = json.dumps(chr(code))
        assert derives(found, text) == (code != 0), text
    assert offers({"type": "string"}, r'"\u0000a"')
    assert not offers({"type": "string", "pattern": "a"}, r'"\u0000a"')
    assert "allows no value" in refusal({"type": "string", "pattern": r"^\x00$"})
    assert not offers({"type": "string", "pattern": r"^[^\x00]*$"}, r'"\u0000"')


def test_counts_are_narrowed() -> None:
    """More than 256 items or unnamed properties are offered only where they are demanded."""
    many: dict[str, Any] = {"type": "array", "items": {"const": 1}, "maxItems": 10_000}
    for schema, least, most in ((many, 0, 256), (many | {"minItems": 300}, 300, 300)):
        found = language(schema)
        for count in (0, 256, 257, 300, 301):
            text = f"[{','.join('1' * count)}]"
            assert derives(found, text) == (least <= count <= most), count
    found = language({"type": "object", "properties": {"a": {"const": 1}}, "maxProperties": 10_000,
                      "additionalProperties": {"const": 2}})  # fmt: skip
    for count in (0, 256, 257):
        others = ",".join(f'"b{n}":2' for n in range(count))
        assert derives(found, f"{{{others}}}") == (count <= 256)
        assert count == 0 or derives(found, f'{{"a":1,{others}}}') == (count <= 256)


def test_recursion_does_not_end() -> None:
    text = '{"value":0}'
    for _ in range(12):
        assert offers(LINKED, text)
        text = f'{{"value":0,"next":{text}}}'
    assert not offers(LINKED, '{"value":0,"next":{}}')


@pytest.mark.parametrize(
    ("gap", "text", "accepted"),
    [
        ("", '{"a":null}', True),
        ("", '{"a": null}', False),
        (r"[ \n]*", '{\n  "a":\n null }', True),
    ],
)
def test_white_space_may_be_chosen(gap: str, text: str, accepted: bool) -> None:
    schema = record(a={"type": "null"})
    constraint = Constraint.from_value("json_schema", schema, whitespace=gap)
    assert derives(constraint_language(constraint, LIMITS), text) == accepted
    for wrong in ("x", ".", r"\s"):
        with pytest.raises(ConstraintError, match="only JSON's"):
            constraint_language(
                Constraint.from_value("json_schema", schema, whitespace=wrong), LIMITS
            )
    with pytest.raises(ConstraintError, match="white space is settled for json_schema"):
        Constraint.from_value("regex", "a", whitespace=" ")
