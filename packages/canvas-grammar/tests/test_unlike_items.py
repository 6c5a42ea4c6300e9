"""Items and properties that are unlike each other without anything that remembers them."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import pytest
from canvas_grammar.grammar.decimals import few_numbers, surely_within
from canvas_grammar.grammar.json.facts import fits_number
from canvas_grammar.grammar.json.unlike_items import MOST_KINDS
from canvas_grammar.grammar.json_facts import NumberFacts
from canvas_grammar_support.helpers import STRING, compiled, tiny
from canvas_grammar_support.json_languages import drawn, language, offered, refusal, validator_of
from hypothesis import given
from hypothesis import strategies as st

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


STEPS = st.sampled_from([Fraction(n, d) for n in range(1, 12) for d in (1, 2, 4, 10)])
BOUND = st.none() | st.integers(-40, 40).map(Fraction)
FACTS = st.builds(
    NumberFacts,
    integer=st.booleans(),
    least=BOUND,
    above=st.booleans(),
    most=BOUND,
    below=st.booleans(),
    multiples=st.lists(STEPS, max_size=2).map(tuple),
)


@given(FACTS, FACTS)
def test_few_numbers_are_those_that_fit(facts: NumberFacts, barred: NumberFacts) -> None:
    facts = NumberFacts(*list(vars(facts).values())[:-1], excluded=(barred,))
    found = few_numbers(facts)
    if found is None:
        assert not (facts.multiples or facts.integer) or None in (facts.least, facts.most)
        return
    grid = (Fraction(n, 40) for n in range(-1600, 1601))
    fitting = {value for value in grid if fits_number(facts, value)}  # type: ignore[arg-type]
    assert {Fraction(text) for text in found} >= fitting
    assert all(fits_number(facts, Fraction(text)) for text in found)  # type: ignore[arg-type]


@given(FACTS, FACTS)
def test_what_is_surely_within_is_within(one: NumberFacts, other: NumberFacts) -> None:
    if surely_within(one, other):
        for value in (Fraction(n, 20) for n in range(-900, 900)):
            fits = fits_number(one, value)  # type: ignore[arg-type]
            assert not fits or fits_number(other, value)  # type: ignore[arg-type]


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
