"""Schemas of strings, numbers, booleans and null."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from vllm_dllm.constraints.grammar.json_facts import NumberFacts, StringFacts
from vllm_dllm.constraints.grammar.json_numbers import number_language
from vllm_dllm.constraints.grammar.json_strings import string_language
from vllm_dllm.constraints.grammar.json_values import whole_number
from vllm_dllm.constraints.grammar.language import Node, either, literal
from vllm_dllm.constraints.limits import ConstraintError

TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")


def has_type(value: Any, name: str) -> bool:
    """Whether a JSON value has a type of JSON Schema; 1.0 is an integer, and true is no number."""
    if name == "integer":
        return whole_number(value) is not None
    if name == "number":
        return isinstance(value, int | float) and not isinstance(value, bool)
    kinds: dict[str, tuple[type, ...]] = {
        "array": (list,),
        "boolean": (bool,),
        "null": (type(None),),
        "object": (dict,),
        "string": (str,),
    }
    return isinstance(value, kinds[name])


def scalar(name: str, schema: Mapping[str, Any], path: str) -> Node:
    """The values of type `name` that satisfy a schema; `path` is its place, for messages.

    Raises:
        ConstraintError: a keyword has an invalid value, or is not supported together with another.
    """
    if name == "null":
        return literal("null")
    if name == "boolean":
        return either([literal("true"), literal("false")])
    try:
        if name == "string":
            return string_language(_string_facts(schema))
        return number_language(_number_facts(name, schema))
    except ConstraintError as error:
        raise ConstraintError(f"{path}: {error}") from error


def _string_facts(schema: Mapping[str, Any]) -> StringFacts:
    for name in ("pattern", "format"):
        if name in schema and not isinstance(schema[name], str):
            raise ConstraintError(f"{name} is a string")
    for name in ("minLength", "maxLength"):
        if name in schema and (whole_number(schema[name]) is None or schema[name] < 0):
            raise ConstraintError(f"{name} is a count of characters")
    least, most = (whole_number(schema.get(name)) for name in ("minLength", "maxLength"))
    patterns, formats = (
        (schema[name],) if name in schema else () for name in ("pattern", "format")
    )
    return StringFacts(least or 0, most, patterns, formats)


def _number_facts(name: str, schema: Mapping[str, Any]) -> NumberFacts:
    least, above = _bound(schema, "minimum", "exclusiveMinimum", max)
    most, below = _bound(schema, "maximum", "exclusiveMaximum", min)
    return NumberFacts(name == "integer", least, above, most, below)


def exact(value: int | float) -> Fraction:
    """The number that a schema writes: of 0.1, a tenth rather than what its double is."""
    return Fraction(repr(value)) if isinstance(value, float) else Fraction(value)


def _bound(
    schema: Mapping[str, Any], name: str, exclusive: str, tighter: Any
) -> tuple[Fraction | None, bool]:
    """A bound, and whether it is excluded; the tighter bound if both keywords are given."""
    bounds = []
    for keyword in (name, exclusive):
        if keyword not in schema:
            continue
        value = schema[keyword]
        if not has_type(value, "number") or (isinstance(value, float) and not math.isfinite(value)):
            raise ConstraintError(f"{keyword} is a number")
        bounds.append(exact(value))
    if not bounds:
        return None, False
    bound = tighter(bounds)
    return bound, exclusive in schema and exact(schema[exclusive]) == bound
