"""JSON schemas: what is offered validates with an independent validator, the rest is refused."""

from __future__ import annotations

import json
import re
from datetime import datetime
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outlines_core.json_schema import build_regex_from_schema

from tests.constraints.helpers import accepts, dumped, over_bytes, record
from tests.constraints.texts import some_texts
from vllm_dllm.constraints.automaton.compilation import Constraint
from vllm_dllm.constraints.grammar.json_schema import ANNOTATIONS, SUPPORTED
from vllm_dllm.constraints.limits import ConstraintError

STRING: dict[str, Any] = {"type": "string"}
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
    ({"type": "integer", "enum": ["a", 1, 2.0, True]}, ["1", "2.0"], ['"a"', "true"]),
    ({"const": "é"}, ['"é"'], ['"e"']),
    ({"type": "array", "items": STRING}, ["[]", '["a"]', '["a","b"]', '[ "a", "b" ]'], ['["a",]']),
    ({"type": "array", "items": {"type": "null"}, "minItems": 1, "maxItems": 2},
     ["[null]", "[null, null]"], ["[]", "[null,null,null]"]),
    ({"type": "array", "items": False}, ["[]"], ["[null]"]),
    ({"type": "array", "items": STRING, "maxItems": 0}, ["[]"], ['["a"]']),
    ({"type": "array", "prefixItems": [{"type": "null"}, STRING], "items": {"type": "boolean"}},
     ['[null, "a"]', '[null,"a",true]'], ["[null]", '[null,"a","b"]']),
    (record(a={"type": "null"}, b=STRING), ['{"a": null, "b": "x"}', '{ "a":null,"b":"x" }'],
     ['{"b": "x", "a": null}', '{"a": null}', "{}"]),
    ({"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"},
                                       "c": {"type": "null"}}, "required": ["b"]},
     ['{"b":null}', '{"a":null,"b":null}', '{"b":null,"c":null}', '{"a":null,"b":null,"c":null}'],
     ["{}", '{"a":null}', '{,"b":null}', '{"b":null,}', '{"a":null,"c":null}']),
    ({"properties": {"a": {"type": "null"}, "b": {"type": "null"}}},
     ["{}", '{"a":null}', '{"b":null}', '{"a":null,"b":null}'], ['{"b":null,"a":null}']),
    ({"type": "object", "properties": {}}, ["{}"], ['{"a":1}']),
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
    found = over_bytes("json_schema", schema)
    assert [text for text in good if not found.accepts(text.encode())] == []
    assert [text for text in bad if found.accepts(text.encode())] == []


@pytest.mark.parametrize("schema", [case[0] for case in CASES])
def test_whatever_is_offered_validates(schema: Any) -> None:
    """Texts drawn from the automaton itself, checked by `jsonschema` with its formats."""
    checker = jsonschema.FormatChecker(["date", "ipv4", "email", "uuid"])
    validator = jsonschema.Draft202012Validator(schema, format_checker=checker)
    for text in some_texts(over_bytes("json_schema", schema), 40):
        validator.validate(json.loads(text))


def test_times_are_times() -> None:
    """`jsonschema` alone checks no times of RFC 3339."""
    for name in ("time", "date-time"):
        found = over_bytes("json_schema", {"type": "string", "format": name})
        for text in some_texts(found, 200):
            moment = json.loads(text).replace("Z", "+00:00")
            datetime.fromisoformat(moment if name == "date-time" else f"2024-02-29T{moment}")


def refusal(schema: Any) -> str:
    with pytest.raises(ConstraintError) as caught:
        over_bytes("json_schema", schema)
    return str(caught.value)


NOT_SUPPORTED = [
    *("not", "if", "then", "else", "dependentSchemas", "dependentRequired", "contains"),
    *("minContains", "maxContains", "patternProperties", "propertyNames", "unevaluatedItems"),
    *("unevaluatedProperties", "multipleOf", "contentEncoding", "contentMediaType", "$anchor"),
    *("$dynamicRef", "$dynamicAnchor", "dependencies", "additionalItems", "nullable", "xml"),
    *("contentSchema", "$recursiveRef", "$vocabulary", "minimun"),
]


@pytest.mark.parametrize("keyword", NOT_SUPPORTED)
def test_other_keywords_are_refused_by_name(keyword: str) -> None:
    said = refusal(record(a={"type": "string", keyword: {}}))
    assert said.startswith(f"$.a: keyword {keyword} is not supported; supported: $ref, ")
    assert all(name in said for name in SUPPORTED)


def test_every_supported_keyword_is_tried_here() -> None:
    tried = {word for case in CASES for word in re.findall(r'"([$a-zA-Z]+)":', dumped(case[0]))}
    assert set(SUPPORTED) - tried == {"uniqueItems", "minProperties"}, "see below"
    assert accepts("json_schema", {"type": "array", "items": STRING, "uniqueItems": False}, "[]")
    least = {"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 1}
    assert not accepts("json_schema", least, "{}")
    assert accepts("json_schema", least, '{"a":null}')
    assert "title" in ANNOTATIONS


@pytest.mark.parametrize(
    ("schema", "complaint"),
    [
        (True, "$: any JSON is allowed here"),
        ({}, "$: any JSON is allowed here"),
        ({"type": "object"}, "$: any JSON is allowed here"),
        ({"type": "array"}, "$.items: any JSON is allowed here"),
        (record(a={}), "$.a: any JSON is allowed here"),
        (
            {"type": "array", "items": STRING, "uniqueItems": True},
            "$: uniqueItems is not supported",
        ),
        ({"type": "string", "pattern": "a", "maxLength": 2}, "$: pattern together with maxLength"),
        ({"type": "string", "pattern": "a", "format": "date"}, "$: pattern together with format"),
        ({"type": "string", "pattern": "(?=a)"}, "$: looking ahead"),
        ({"type": "string", "pattern": "(?i)a"}, "$: a schema's pattern has no inline flags"),
        ({"type": "string", "format": "iri"}, "$: format 'iri' is not supported; supported: date"),
        ({"type": "number", "minimum": 0.5}, "$: bounds of a number are whole numbers"),
        ({"type": "integer", "minimum": 10**31}, "$: integer bounds go up to"),
        ({"type": "integer", "minimum": "1"}, "$: minimum is a number"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "the schema allows no value"),
        ({"type": "tuple"}, "$: type tuple is not one of array"),
        ({"type": []}, "the schema allows no value"),
        ({"enum": []}, "$: enum is a list of values"),
        ({"enum": [1], "minimum": 0}, "$: enum together with minimum is not supported"),
        ({"const": 1, "enum": [1]}, "$: const together with enum is not supported"),
        ({"anyOf": [STRING], "minLength": 1}, "$: anyOf together with minLength"),
        ({"anyOf": []}, "$: anyOf is a list of schemas"),
        ({"type": "object", "anyOf": [STRING]}, "$: anyOf[0] has a type that the schema around"),
        ({"oneOf": [STRING, {"type": "string", "maxLength": 3}]}, "numbers 0 and 1 may share some"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "numbers 0 and 1 may share some"),
        ({"oneOf": [{"const": 1}, {"enum": [2, 1.0]}]}, "numbers 0 and 1 may share some"),
        ({"oneOf": [{"properties": {"a": STRING}}, STRING]}, "numbers 0 and 1 may share some"),
        ({"allOf": [STRING, STRING]}, "$: allOf of several schemas"),
        ({"$ref": "#/$defs/x"}, "$: $ref #/$defs/x leads nowhere"),
        ({"$ref": "other.json"}, "$: $ref other.json is not supported"),
        ({"$ref": "#", "minLength": 1}, "$: $ref together with minLength"),
        ({"$ref": "#"}, "$: $ref # leads back to where it is used before"),
        ({"anyOf": [{"$ref": "#"}, STRING]}, "$.anyOf[0]: $ref # leads back to where it is used"),
        (
            {
                "anyOf": [{"$ref": "#/$defs/a"}, STRING],
                "$defs": {
                    "a": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/b"}]},
                    "b": {"allOf": [{"$ref": "#/%24defs/a"}]},
                },
            },
            "#/$defs/b.allOf[0]: $ref #/%24defs/a leads back to where it is used",
        ),
        (
            record(a={"type": "array", "items": {"$ref": "#/properties/a/items"}}),
            "$.a.items: $ref #/properties/a/items leads back",
        ),
        (record(a={"$ref": "#"}), "the schema allows no value within 4 levels"),
        ({"type": "array", "items": [STRING]}, "$: items is one schema, prefixItems is a list"),
        ({"type": "array", "items": STRING, "minItems": -1}, "$: -1 is no count of items"),
        ({"properties": {"a": STRING}, "required": ["b"]}, "$: required names b, which properties"),
        ({"properties": {"a": STRING}, "minProperties": 1}, "$: minProperties or maxProperties"),
        (
            {"properties": {"a": STRING, "b": STRING}, "required": ["a", "a"], "minProperties": 2},
            "$: minProperties or maxProperties beside optional properties",
        ),
        ({"additionalProperties": STRING, "minProperties": 2}, "$: minProperties above 1"),
        ({"properties": []}, "$: properties is an object"),
        ([], "$: a schema is an object, got []"),
        ("nonsense", "json_schema: not JSON"),
        ('{"type": "nu', "json_schema: not JSON"),
    ],
)
def test_refused(schema: Any, complaint: str) -> None:
    assert complaint in refusal(schema)


def test_the_trap_of_the_library_s_own_conversion() -> None:
    """It drops bounds without a word; here they hold."""
    schema = {"type": "integer", "minimum": 10, "maximum": 12}
    assert re.fullmatch(build_regex_from_schema(json.dumps(schema)), "3")
    assert not accepts("json_schema", schema, "3")
    unique = {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True}
    assert re.fullmatch(build_regex_from_schema(json.dumps(unique)), "[true,true]")
    assert "uniqueItems" in refusal(unique)
    both = {"type": "string", "pattern": "a+", "maxLength": 2}
    assert "a+" not in build_regex_from_schema(json.dumps(both))
    assert "pattern together with maxLength" in refusal(both)


@settings(max_examples=100)
@given(st.integers(-1300, 1300), st.integers(0, 1300), st.lists(st.integers(-2000, 2000)))
def test_bounds_of_integers(low: int, span: int, values: list[int]) -> None:
    found = over_bytes("json_schema", {"type": "integer", "minimum": low, "maximum": low + span})
    for value in (*values, low - 1, low, low + span, low + span + 1):
        assert found.accepts(str(value).encode()) == (low <= value <= low + span), value


@settings(max_examples=60)
@given(
    st.integers(-30, 30),
    st.integers(0, 30),
    st.sampled_from(["minimum", "exclusiveMinimum"]),
    st.sampled_from(["maximum", "exclusiveMaximum"]),
    st.lists(st.decimals(-40, 70, places=2), min_size=5),
)
def test_bounds_of_numbers(low: int, span: int, least: str, most: str, values: list[Any]) -> None:
    schema = {"type": "number", least: low, most: low + span}
    try:
        found = over_bytes("json_schema", schema)
    except ConstraintError:
        assert span == 0 and (least, most) != ("minimum", "maximum")
        return
    for value in (*values, low, low + span):
        valid = jsonschema.Draft202012Validator(schema).is_valid(float(value))
        assert found.accepts(str(value).encode()) == valid, value


KEYWORDS = st.sampled_from([*SUPPORTED, "$defs", "title", "a", "b"])
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 12) | st.sampled_from(["", "a", "#", "^a", "date"])
    | st.sampled_from(["object", "array", "string", "integer", "number", "null", "#/$defs/a"]),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(KEYWORDS, inside, max_size=4),
    max_leaves=12,
)  # fmt: skip
VALUE = st.deferred(
    lambda: (
        st.fixed_dictionaries({"type": st.sampled_from(["integer", "string", "boolean"])})
        | st.fixed_dictionaries({"enum": st.lists(ANYTHING, min_size=1, max_size=3)})
        | st.fixed_dictionaries({"items": VALUE, "maxItems": st.integers(0, 3)})
        | st.fixed_dictionaries({"anyOf": st.lists(VALUE, min_size=1, max_size=3)})
        | st.fixed_dictionaries({"oneOf": st.lists(VALUE, min_size=1, max_size=3)})
        | st.fixed_dictionaries(
            {"properties": st.dictionaries(st.sampled_from(["a", "b", 'é"']), VALUE, max_size=3)},
            optional={"required": st.just([]), "additionalProperties": st.just(False)},
        )
    )
)


@settings(max_examples=300)
@given(st.dictionaries(KEYWORDS, ANYTHING, min_size=1, max_size=3))
def test_nonsense_is_refused_and_breaks_nothing(schema: Any) -> None:
    try:
        over_bytes("json_schema", dumped(schema))
    except ConstraintError as error:
        assert str(error)


@settings(max_examples=60)
@given(VALUE)
def test_random_schemas_offer_only_what_validates(schema: Any) -> None:
    try:
        found = over_bytes("json_schema", dumped(schema))
    except ConstraintError as error:
        assert "oneOf is supported where" in str(error) or "no value" in str(error)
        return
    validator = jsonschema.Draft202012Validator(schema)
    for text in some_texts(found, 10):
        validator.validate(json.loads(text))


def test_a_character_that_a_pattern_excludes_is_not_offered() -> None:
    """U+0000 too, which is in no set of characters, so its complement is all of them."""
    schema = {"type": "string", "pattern": r"^[^\x00]$"}
    found = over_bytes("json_schema", schema)
    for code in range(0x7F):
        text = json.dumps(chr(code))
        assert found.accepts(text.encode()) == (code != 0), text
    assert accepts("json_schema", {"type": "string", "pattern": r"^\x00$"}, r'"\u0000"')
    assert accepts("json_schema", {"type": "string", "pattern": "a"}, r'"\u0000a"')
    assert not accepts("json_schema", {"type": "string", "pattern": r"^[^\x00]*$"}, r'"\u0000"')


def test_recursion_ends_at_the_stated_depth() -> None:
    text = '{"value":0}'
    for depth in range(5):
        assert accepts("json_schema", LINKED, text), depth
        text = f'{{"value":0,"next":{text}}}'
    assert not accepts("json_schema", LINKED, text)


def test_too_deep_and_too_large() -> None:
    deep: Any = STRING
    for _ in range(80):
        deep = {"type": "array", "items": deep}
    assert "nested deeper than 64" in refusal(deep)
    deeper = '{"type":"array","items":' * 60_000 + "{}" + "}" * 60_000
    assert re.search("not JSON|characters long", refusal(deeper))
    # Each definition holds the next one twice: 2^30 parts written out.
    defs = {str(n): record(a={"$ref": f"#/$defs/{n + 1}"}, b={"$ref": f"#/$defs/{n + 1}"})
            for n in range(30)} | {"30": {"type": "null"}}  # fmt: skip
    assert "is too large" in refusal({"$ref": "#/$defs/0", "$defs": defs})


@pytest.mark.parametrize(
    ("gap", "text", "accepted"),
    [
        ("", '{"a":null}', True),
        ("", '{"a": null}', False),
        (r"[ \n]*", '{\n  "a":\n null }', True),
    ],
)
def test_white_space_may_be_chosen(gap: str, text: str, accepted: bool) -> None:
    from tests.constraints.helpers import LIMITS
    from vllm_dllm.constraints.automaton.byte_automaton import byte_automaton
    from vllm_dllm.constraints.automaton.compilation import language

    schema = record(a={"type": "null"})
    constraint = Constraint.of("json_schema", schema, whitespace=gap)
    assert byte_automaton(language(constraint, LIMITS), LIMITS).accepts(text.encode()) == accepted
    for wrong in ("x", ".", r"\s"):
        with pytest.raises(ConstraintError, match="only JSON's"):
            language(Constraint.of("json_schema", schema, whitespace=wrong), LIMITS)
    with pytest.raises(ConstraintError, match="white space is settled for json_schema"):
        Constraint.of("regex", "a", whitespace=" ")
