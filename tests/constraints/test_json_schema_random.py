"""Random JSON schemas: what is offered validates with an independent validator."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.constraints.helpers import (
    dumped,
    over_bytes,
    reads,
)
from tests.constraints.texts import some_texts
from vllm_dllm.constraints.grammar.json_schema import SUPPORTED
from vllm_dllm.constraints.limits import ConstraintError


@settings(max_examples=100)
@given(st.integers(-1300, 1300), st.integers(0, 1300), st.lists(st.integers(-2000, 2000)))
def test_bounds_of_integers(low: int, span: int, values: list[int]) -> None:
    found = over_bytes("json_schema", {"type": "integer", "minimum": low, "maximum": low + span})
    for value in (*values, low - 1, low, low + span, low + span + 1):
        assert reads(found, str(value).encode()) == (low <= value <= low + span), value


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
        # Right above an excluded bound, a fraction that ends in 0 is valid but not offered.
        text = str(value)
        shortest = text.rstrip("0").rstrip(".") if "." in text else text
        assert reads(found, shortest.encode()) == valid, value
        assert valid or not reads(found, text.encode()), value


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
