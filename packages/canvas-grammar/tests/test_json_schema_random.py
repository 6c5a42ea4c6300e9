"""Random JSON schemas: what is offered validates with an independent validator."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jsonschema
from canvas_grammar.grammar.json.subschemas import OF_SOME_DRAFTS, SUPPORTED
from canvas_grammar.limits import ConstraintError
from canvas_grammar_support.derivations import derives
from canvas_grammar_support.helpers import dumped
from canvas_grammar_support.json_languages import drawn, language, validator_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

KEYWORDS = st.sampled_from([*SUPPORTED, "$defs", "title", "a", "b"])
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 12) | st.sampled_from(["", "a", "#", "^a", "date"])
    | st.sampled_from(["object", "array", "string", "integer", "number", "null", "#/$defs/a"]),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(KEYWORDS, inside, max_size=4),
    max_leaves=12,
)  # fmt: skip
NAMES = st.sampled_from(["a", "b", 'é"'])
CONSTANTS = st.sampled_from([0, 1, 1.0, "a", "", None, True, [], [1], {}, {"a": 1}])
COUNTS = st.integers(0, 3)
KIND = st.sampled_from(["integer", "number", "string", "boolean", "null", "array", "object"])
OLDER = {"dependencies", "additionalItems"}  # of up to draft-2019-09: see `test_json_drafts`


@st.composite
def schemas(draw: Any, depth: int = 3) -> Any:
    """Schemas with few keywords each."""
    names = draw(st.lists(st.sampled_from(sorted(PLAIN)), min_size=1, max_size=3, unique=True))
    return {name: draw(PLAIN[name](depth)) for name in names}


def inside(depth: int) -> st.SearchStrategy[Any]:
    return st.booleans() | schemas(depth - 1) if depth > 0 else st.just(True)


def table(depth: int) -> st.SearchStrategy[Any]:
    return st.dictionaries(NAMES, inside(depth), max_size=2)


def several(depth: int) -> st.SearchStrategy[Any]:
    return st.lists(inside(depth), min_size=1, max_size=3)


# From a keyword to its values; `d` is how deep schemas may nest in them.
PLAIN: dict[str, Callable[[int], st.SearchStrategy[Any]]] = {
    "type": lambda d: KIND | st.lists(KIND, max_size=3, unique=True),
    "enum": lambda d: st.lists(CONSTANTS, min_size=1, max_size=3),
    "const": lambda d: CONSTANTS,
    "properties": lambda d: table(d),
    "patternProperties": lambda d: st.dictionaries(
        st.sampled_from(["^a", "b"]), inside(d), max_size=2
    ),
    "additionalProperties": lambda d: inside(d),
    "unevaluatedProperties": lambda d: inside(d),
    "required": lambda d: st.lists(NAMES, max_size=2, unique=True),
    "propertyNames": lambda d: inside(d),
    "dependentRequired": lambda d: st.dictionaries(NAMES, st.lists(NAMES, max_size=2), max_size=2),
    "dependentSchemas": lambda d: table(d),
    "minProperties": lambda d: COUNTS,
    "maxProperties": lambda d: COUNTS,
    "items": lambda d: inside(d),
    "prefixItems": lambda d: several(d),
    "unevaluatedItems": lambda d: inside(d),
    "contains": lambda d: inside(d),
    "minContains": lambda d: COUNTS,
    "maxContains": lambda d: COUNTS,
    "minItems": lambda d: COUNTS,
    "maxItems": lambda d: COUNTS,
    "uniqueItems": lambda d: st.booleans(),
    "minLength": lambda d: COUNTS,
    "maxLength": lambda d: COUNTS,
    "pattern": lambda d: st.sampled_from(["^a", "b$"]),
    "format": lambda d: st.just("date"),
    "minimum": lambda d: st.integers(-2, 2),
    "maximum": lambda d: st.integers(-2, 2),
    "exclusiveMinimum": lambda d: st.integers(-2, 2),
    "exclusiveMaximum": lambda d: st.integers(-2, 2),
    "multipleOf": lambda d: st.sampled_from([1, 2]),
    "allOf": lambda d: several(d),
    "anyOf": lambda d: several(d),
    "oneOf": lambda d: several(d),
    "not": lambda d: inside(d),
    "if": lambda d: inside(d),
    "then": lambda d: inside(d),
    "else": lambda d: inside(d),
    "$ref": lambda d: st.just("#/$defs/d"),
}


@settings(max_examples=300)
@given(st.dictionaries(KEYWORDS, ANYTHING, min_size=1, max_size=3))
def test_nonsense_is_refused_and_breaks_nothing(schema: Any) -> None:
    try:
        language(schema)
    except ConstraintError as error:
        assert str(error)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(schemas(), st.integers(0, 99))
def test_random_schemas_offer_only_what_validates(schema: Any, seed: int) -> None:
    whole = {**schema, "$defs": {"d": {"type": ["object", "null"], "required": ["a"]}}}
    try:
        node = language(whole)
    except ConstraintError:
        return
    validator = validator_of(whole)
    for text in drawn(node, 10, seed):
        validator.validate(json.loads(text))


INSTANCES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 3) | st.sampled_from(["", "a", "ab", "é"]),
    lambda inside: st.lists(inside, max_size=2) | st.dictionaries(NAMES, inside, max_size=2),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(schemas(), INSTANCES)
def test_instances_that_do_not_validate_are_not_derived(schema: Any, instance: Any) -> None:
    whole = {**schema, "$defs": {"d": {"type": ["object", "null"], "required": ["a"]}}}
    try:
        node = language(whole)
    except ConstraintError:
        return
    try:
        validator_of(whole).validate(instance)
    except jsonschema.ValidationError:
        assert not derives(node, dumped(instance))


def test_every_keyword_is_drawn() -> None:
    assert set(SUPPORTED) - set(PLAIN) - OLDER == {"$dynamicRef", "$recursiveRef"}
    assert set(OF_SOME_DRAFTS) >= OLDER
