"""Items and properties that are unlike each other without anything that remembers them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from canvas_grammar.grammar.json.scalars import MOST_KINDS
from canvas_grammar_support.derivations import drawn
from canvas_grammar_support.helpers import STRING, compiled, tiny
from canvas_grammar_support.json_languages import language, offered, refusal, validator_of

INTEGER: dict[str, Any] = {"type": "integer"}


def unique(items: Any, **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, "uniqueItems": True, **more}


@pytest.mark.parametrize(
    ("schema", "fit", "others"),
    [
        (unique(STRING), ["[]", '["b"]', '["x","a","b"]', '["","b"]', '["é","b"]'],
         ['["a","a"]', '["",""]', '["ab","ac"]', '["a","A"]', '["é","ö"]']),
        (unique(STRING, minItems=2, maxItems=3), ['["c","a"]', '["c","a","b"]'],
         ["[]", '["a"]', '["a","b","c","d"]']),
        (unique(INTEGER), ["[3,-1,20]", "[0,-5]"], ["[1,1]", "[1,10]", "[-1,-2]"]),
        (unique({"type": "number"}), ["[0.5,1,-0.5]"], ["[1,1.0]", "[0,-0]", "[1e0,2]"]),
        (unique({"type": ["string", "integer", "null"]}), ['[null,"1",1]'], ["[null,null]"]),
        (unique({"enum": ["a", "b", "c"], "minLength": 1}), ['["a","c"]'], ['["c","a"]']),
        (unique({"anyOf": [{"const": "a"}, {"type": "string", "pattern": "^a"}]}), ['["a"]'],
         ['["a","ab"]']),
        (unique({"type": "object"}), ["[]", "[{}]"], ["[{},{}]"]),
        (unique({"type": "string", "maxLength": 39}), ["[]", '["a"]'], ['["a","b"]']),
        (unique(STRING, contains={"const": "a"}), ['["a"]'], ["[]", '["a","b"]']),
        (unique(STRING, prefixItems=[INTEGER]), ["[]", "[1]"], ['[1,"a"]']),
    ],
    ids=str,
)  # fmt: skip
def test_unique_items(schema: Any, fit: list[str], others: list[str]) -> None:
    assert offered(schema, *fit, *others) == " ".join(fit)


@pytest.mark.parametrize("items", [STRING, {"type": "number"}, {"type": ["string", "number"]}])
def test_any_order_and_number_of_items(items: Any) -> None:
    texts = [json.loads(text) for text in drawn(language(unique(items)), 150)]
    for value in texts:
        validator_of(unique(items)).validate(value)
    assert {len(items) for items in texts} == set(range(MOST_KINDS + 1))
    firsts = {json.dumps(items[0])[:2] for items in texts if items}
    assert len(firsts) > MOST_KINDS


def test_unique_items_take_no_place_of_the_stack() -> None:
    """A list after an item is called last, so nothing waits for its end."""
    found = compiled("json_schema", unique(STRING, minItems=MOST_KINDS), tiny())
    assert found.facts.minimum <= 4 * MOST_KINDS + 2


def test_too_many_unique_items_are_refused() -> None:
    said = refusal(unique(STRING, minItems=MOST_KINDS + 1))
    assert said.startswith("$: uniqueItems is supported for 7 items or more only if")
    assert "uniqueItems" in refusal(unique({}, minItems=2))


@pytest.mark.parametrize(
    ("schema", "fit", "others"),
    [
        ({"minProperties": 2}, ['{"a":1,"b":2}', '{"z":1,"a":2,"":3}'], ["{}", '{"a":1}',
         '{"a":1,"a":2}']),
        ({"minProperties": 3, "properties": {"a": INTEGER}}, ['{"a":1,"b":2,"c":3}'],
         ['{"b":1,"c":2}', '{"a":1,"b":2,"h":3}']),
        ({"minProperties": 2, "maxProperties": 2}, ['{"a":1,"b":2}'], ['{"a":1,"b":2,"c":3}']),
    ],
    ids=str,
)  # fmt: skip
def test_properties_that_no_schema_names(schema: Any, fit: list[str], others: list[str]) -> None:
    assert offered({"type": "object", **schema}, *fit, *others) == " ".join(fit)


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"propertyNames": False}},
        {"not": {"propertyNames": {"not": {"const": "0"}}}},
        {"not": {"propertyNames": {"maxLength": 9}}},
        {"not": {"patternProperties": {"^x[0-9]{2}": STRING}}},
        {"not": {"additionalProperties": STRING}, "propertyNames": {"pattern": "^k"}},
        {"not": {"patternProperties": {"a": False}}, "patternProperties": {"b": INTEGER},
         "additionalProperties": False},
    ],
    ids=str,
)  # fmt: skip
def test_a_name_is_made_up_for_a_property_that_there_must_be(schema: Any) -> None:
    schema = {"type": "object", **schema}
    texts = drawn(language(schema), 20)
    assert texts
    for text in texts:
        validator_of(schema).validate(json.loads(text))


def test_names_that_are_named_are_preferred() -> None:
    for denied in ({"additionalProperties": STRING}, {"patternProperties": {"k": STRING}}):
        schema = {"type": "object", "properties": {"k1": {}}, "not": denied}
        texts = drawn(language(schema), 20)
        assert texts and all("k1" in json.loads(text) for text in texts)


@pytest.mark.parametrize(
    ("schema", "texts"),
    [
        ({"multipleOf": 8721, "minimum": -10_000, "maximum": 20_000, "type": "integer"},
         {"-8721", "0", "8721", "17442"}),
        ({"multipleOf": 13.5, "exclusiveMinimum": 0, "maximum": 54, "not": {"multipleOf": 13}},
         {"13.5", "27", "40.5", "54"}),
    ],
)  # fmt: skip
def test_bounds_and_a_divisor_of_many_remainders(schema: Any, texts: set[str]) -> None:
    found = {json.loads(text) for text in drawn(language({"type": "number", **schema}), 80)}
    assert found == {float(text) for text in texts}


def test_a_choice_without_numbers_is_no_choice() -> None:
    """Multiples of 10 of which one schema takes more than the other: 40 alone."""
    options = [{"multipleOf": 10, "maximum": 35}, {"multipleOf": 10, "maximum": 40}]
    found = drawn(language({"type": "number", "oneOf": options}), 20)
    assert {float(text) for text in found} == {40.0}
