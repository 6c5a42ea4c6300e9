"""JSON schemas that are refused, each with a message that names the place and the reason."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.constraints.helpers import STRING, record
from tests.constraints.json_languages import LIMITS
from tests.constraints.json_languages import refusal as schema_refusal
from vllm_dllm.constraints.grammar.json.reader import read_schema

ANNOTATIONS = ("minimun", "nullable", "xml", "x-order", "extends", "markdownDescription")


@pytest.mark.parametrize("keyword", ANNOTATIONS)
def test_what_no_draft_has_is_ignored_and_said(keyword: str) -> None:
    found = read_schema(record(a={"type": "string", keyword: {}}), LIMITS)
    assert found.ignored == (f"$.a: {keyword}",)
    assert read_schema(record(a=STRING), LIMITS).ignored == ()


def test_what_counts_nothing_beside_a_reference_is_said() -> None:
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/definitions/a",
              "maxLength": 2, "definitions": {"a": STRING}}  # fmt: skip
    (said,) = read_schema(schema, LIMITS).ignored
    assert said.startswith("$: maxLength (up to draft-07")


def test_a_negation_that_cannot_be_said_in_full_is_named() -> None:
    schema = {"type": "object", "not": {"patternProperties": {"^x": STRING}, "required": ["a"]}}
    assert read_schema(schema, LIMITS).left_out == ("$.not: a property that no schema names",)


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
    assert complaint in schema_refusal(schema)


def test_too_deep_and_too_large() -> None:
    deep: Any = STRING
    for _ in range(80):
        deep = {"type": "array", "items": deep}
    assert "nested deeper than 64" in schema_refusal(deep)
    deeper = '{"type":"array","items":' * 60_000 + "{}" + "}" * 60_000
    assert re.search("not JSON|characters long", schema_refusal(deeper))
    # Each definition holds the next one twice: 2^30 parts written out.
    defs = {str(n): record(a={"$ref": f"#/$defs/{n + 1}"}, b={"$ref": f"#/$defs/{n + 1}"})
            for n in range(30)} | {"30": {"type": "null"}}  # fmt: skip
    assert "is too large" in schema_refusal({"$ref": "#/$defs/0", "$defs": defs})
