"""Random JSON schemas: what is offered validates with an independent validator."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
from canvas_grammar.grammar.json.subschemas import SUPPORTED
from canvas_grammar.limits import ConstraintError
from canvas_grammar_support.derivations import derives, drawn
from canvas_grammar_support.json_languages import language, validator_of
from canvas_grammar_support.schemas.strategies import NAMES, schemas
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

KEYWORDS = st.sampled_from([*SUPPORTED, "$defs", "title", "a", "b"])
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 12) | st.sampled_from(["", "a", "#", "^a", "date"])
    | st.sampled_from(["object", "array", "string", "integer", "number", "null", "#/$defs/a"]),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(KEYWORDS, inside, max_size=4),
    max_leaves=12,
)  # fmt: skip
INSTANCES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 3) | st.sampled_from(["", "a", "ab", "é"]),
    lambda inside: st.lists(inside, max_size=2) | st.dictionaries(NAMES, inside, max_size=2),
    max_leaves=5,
)


@settings(max_examples=300)
@given(st.dictionaries(KEYWORDS, ANYTHING, min_size=1, max_size=3))
def test_nonsense_is_refused_and_breaks_nothing(schema: Any) -> None:
    try:
        language(schema)
    except ConstraintError as error:
        assert str(error)


@settings(max_examples=400, suppress_health_check=list(HealthCheck))
@given(schemas(), INSTANCES, st.integers(0, 99))
def test_random_schemas_offer_only_what_validates(schema: Any, instance: Any, seed: int) -> None:
    definitions = {"a": {"type": ["object", "null"], "required": ["a"]}, "b": {"minLength": 1}}
    whole = {**schema, "$defs": definitions}
    try:
        node = language(whole)
    except ConstraintError:
        return
    validator = validator_of(whole)
    for text in drawn(node, 10, seed):
        validator.validate(json.loads(text))
    try:
        validator.validate(instance)
    except jsonschema.ValidationError:
        assert not derives(node, json.dumps(instance, ensure_ascii=False))
