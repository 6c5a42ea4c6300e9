"""JSON schemas that are refused, each with a message that names the place and the reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from canvas_grammar.automaton.compilation import Constraint, compile_constraint
from canvas_grammar.automaton.vocabulary import Vocabulary
from canvas_grammar.grammar.json.reader import read_schema
from canvas_grammar.limits import ConstraintError
from canvas_grammar_support.helpers import STRING, record
from canvas_grammar_support.json_languages import LIMITS
from canvas_grammar_support.json_languages import refusal as schema_refusal

ANNOTATIONS = ("minimun", "nullable", "xml", "x-order", "extends", "markdownDescription")


@pytest.mark.parametrize("keyword", ANNOTATIONS)
def test_what_no_draft_has_is_ignored_and_said(keyword: str) -> None:
    found = read_schema(record(a={"type": "string", keyword: {}}))
    assert found.ignored == (f"$.a: {keyword}",)
    assert read_schema(record(a=STRING)).ignored == ()


def test_what_counts_nothing_beside_a_reference_is_said() -> None:
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/definitions/a",
              "maxLength": 2, "definitions": {"a": STRING}}  # fmt: skip
    (said,) = read_schema(schema).ignored
    assert said.startswith("$: maxLength (up to draft-07")


@pytest.mark.parametrize(
    ("schema", "complaint"),
    [
        ({"items": STRING, "uniqueItems": True, "minItems": 7}, "$: uniqueItems is supported for"),
        ({"type": "string", "pattern": "("}, "$: pattern"),
        ({"type": "integer", "minimum": "1"}, "$: minimum is a number, got 1"),
        ({"type": "integer", "minimum": 3, "maximum": 2},
         "$: type, minimum, maximum: the schema allows no value"),
        (record(a=record(b={"type": "string", "enum": [1]})), "$.a.b: type, enum: the schema"),
        (record(a=False), "$.a: false: the schema allows no value"),
        ({"items": {"$ref": "#"}, "minItems": 1, "type": "array"}, "$: items, minItems, type: the"),
        ({"type": "tuple"}, "$: type is one or several of array, boolean"),
        ({"type": []}, "the schema allows no value"),
        ({"enum": []}, "$: enum is a list of values"),
        ({"enum": [1], "minimum": 2}, "the schema allows no value"),
        ({"anyOf": []}, "$: anyOf is a list of schemas"),
        ({"anyOf": [1]}, "$: anyOf is a list of schemas"),
        ({"type": "object", "anyOf": [STRING]}, "the schema allows no value"),
        ({"oneOf": [{"const": 1}, {"enum": [1.0]}]}, "the schema allows no value"),
        ({"not": {}}, "the schema allows no value"),
        ({"type": "string", "not": {"format": "date"}}, "(at $.not it cannot be expressed that"),
        ({"type": "array", "not": {"uniqueItems": True}}, "does not hold: uniqueItems"),
        ({"$ref": "#/$defs/x"}, "$: $ref #/$defs/x leads nowhere"),
        ({"$ref": "#/$defs/x", "$defs": {"x": 1}}, "$: $ref #/$defs/x leads to no schema"),
        ({"$ref": "#/$defs/x", "$defs": {"x": [1]}}, "$: $ref #/$defs/x leads to no schema"),
        ({"$ref": "other.json"}, "$: $ref other.json is not supported"),
        ({"$ref": "#nowhere"}, "$: $ref #nowhere is not supported"),
        ({"$ref": "#", "minLength": 1}, "$: $ref # leads back to where it is used before"),
        ({"$ref": "#"}, "$: $ref # leads back to where it is used before"),
        ({"not": {"$ref": "#"}}, "$.not: $ref # leads back to where it is used before"),
        ({"anyOf": [{"$ref": "#"}, STRING]}, "$.anyOf[0]: $ref # leads back to where it is used"),
        ({"anyOf": [{"$ref": "#/$defs/a"}, STRING], "$defs": {
            "a": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/b"}]},
            "b": {"allOf": [{"$ref": "#/%24defs/a"}]}}},
         "#/$defs/b.allOf[0]: $ref #/%24defs/a leads back to where it is used"),
        (record(a={"type": "array", "items": {"$ref": "#/properties/a/items"}}),
         "$.a.items: $ref #/properties/a/items leads back"),
        (record(a={"$ref": "#"}), "the schema allows no value"),
        ({"type": "array", "items": STRING, "minItems": -1}, "$: minItems is a count, got -1"),
        ({"type": "object", "minProperties": 7}, "$: minProperties asks for 7 properties that"),
        ({"properties": []}, "$: properties is an object of schemas"),
        ({"properties": {f"p{n}": {} for n in range(40)}, "minProperties": 9, "type": "object"},
         "$: minProperties allows 76904685 selections of properties, at most 64"),
        ([], "$: a schema is an object, got []"),
        ("nonsense", "$: a schema is an object, got nonsense"),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "dependencies": 1},
         "$: dependencies is an object"),
    ],
)  # fmt: skip
def test_refused(schema: Any, complaint: str) -> None:
    assert complaint in schema_refusal(schema)


def test_a_place_below_an_id_is_named_once() -> None:
    inner = {"$id": "list", "type": "array", "items": {"$dynamicRef": "#items"}}
    schema = {"$id": "http://example.org/", "$ref": "list", "$defs": {"a": inner}}
    assert schema_refusal(schema).startswith("list.items: $dynamicRef #items is not supported")


def test_a_negation_may_be_left_out_beside_others() -> None:
    """And where nothing else is left, it is refused: see above."""
    assert read_schema({"type": "string", "not": {"format": "date", "minLength": 3}}).node


def test_deep_nesting_is_no_reason() -> None:
    deep: Any = STRING
    for _ in range(80):
        deep = {"type": "array", "items": deep}
    assert read_schema(deep).node
    # Each definition holds the next one twice: 2^30 parts written out, 31 rules.
    defs = {str(n): record(a={"$ref": f"#/$defs/{n + 1}"}, b={"$ref": f"#/$defs/{n + 1}"})
            for n in range(30)} | {"30": {"type": "null"}}  # fmt: skip
    assert read_schema({"$ref": "#/$defs/0", "$defs": defs}).node


BYTES = Vocabulary.from_tokens([bytes([byte]) for byte in range(256)] + [b""], [256])


UNSATISFIABLE = {"type": "string", "pattern": "^a$", "minLength": 2}


@pytest.mark.parametrize(
    ("schema", "complaint"),
    [
        (UNSATISFIABLE, "$: type, pattern, minLength: the schema allows no value"),
        (record(x=record(a=UNSATISFIABLE)), "$.x.a: type, pattern, minLength: the schema allows"),
        ({"type": "array", "items": {"allOf": [UNSATISFIABLE, {"format": "date"}]}, "minItems": 1},
         "$.items: allOf: the schema allows no value"),
        # Not the one that may be left out.
        (record(a={"anyOf": [UNSATISFIABLE, {"type": "null"}]}, b=UNSATISFIABLE),
         "$.b: type, pattern, minLength: the schema allows no value"),
        ({"$ref": "#/$defs/a", "$defs": {"a": record(n=UNSATISFIABLE)}},
         "#/$defs/a.n: type, pattern, minLength: the schema allows no value"),
    ],
)  # fmt: skip
def test_what_only_automata_show_to_be_empty_is_named(schema: Any, complaint: str) -> None:
    with pytest.raises(ConstraintError) as refused:
        compile_constraint(Constraint.from_value("json_schema", schema), BYTES, LIMITS)
    assert str(refused.value).startswith(complaint)


def test_an_expression_without_any_text_is_refused() -> None:
    with pytest.raises(ConstraintError, match=r"^the constraint allows no output at all$"):
        compile_constraint(Constraint.from_value("regex", "a[^\\x00-\\U0010ffff]"), BYTES, LIMITS)


def test_what_is_ignored_is_part_of_what_is_compiled() -> None:
    """Of a schema, and of those in a structural tag; the log names some, each on the same line."""
    schema = record(a={"type": "null", "x-a\nb": 1}, b={"type": "null", "extends": 1})
    content = {"type": "json_schema", "json_schema": schema}
    tag = {"format": {"type": "tag", "begin": "<", "content": content, "end": ">"}}
    for kind, value in (("json_schema", schema), ("structural_tag", tag)):
        facts = compile_constraint(Constraint.from_value(kind, value), BYTES, LIMITS).facts
        assert facts.ignored == ("$.a: x-a\nb", "$.b: extends")
        assert facts.remark().endswith(r"unknown: $.a: x-a\nb, $.b: extends.")
    many = replace(facts, ignored=tuple(f"${n}" for n in range(11)))
    assert many.remark().endswith("$6, $7 and 3 more.")
