"""Schemas of strings, numbers, booleans and null."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from vllm_dllm.constraints.grammar.json_values import (
    integer,
    number,
    string,
    string_of_format,
    string_of_pattern,
    whole_number,
)
from vllm_dllm.constraints.grammar.language import NOTHING, Node, either, literal
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
            return _string(schema)
        least, above = _bound(schema, "minimum", "exclusiveMinimum", max)
        most, below = _bound(schema, "maximum", "exclusiveMaximum", min)
        if least is not None and most is not None and least > most:
            return NOTHING
        if name == "number":
            return number(least, most, above, below)
        low = None if least is None else math.floor(least) + 1 if above else math.ceil(least)
        high = None if most is None else math.ceil(most) - 1 if below else math.floor(most)
        return integer(low, high)
    except ConstraintError as error:
        raise ConstraintError(f"{path}: {error}") from error


def _string(schema: Mapping[str, Any]) -> Node:
    conditions = [name for name in ("pattern", "format") if name in schema]
    lengths = [name for name in ("minLength", "maxLength") if name in schema]
    if len(conditions) > 1 or (conditions and lengths):
        raise ConstraintError(f"{' together with '.join(conditions + lengths)} is not supported")
    for name in conditions:
        if not isinstance(schema[name], str):
            raise ConstraintError(f"{name} is a string")
    if "pattern" in schema:
        return string_of_pattern(schema["pattern"])
    if "format" in schema:
        return string_of_format(schema["format"])
    for name in lengths:
        if whole_number(schema[name]) is None or schema[name] < 0:
            raise ConstraintError(f"{name} is a count of characters")
    return string(whole_number(schema.get("minLength")) or 0, whole_number(schema.get("maxLength")))


def _bound(
    schema: Mapping[str, Any], name: str, exclusive: str, tighter: Any
) -> tuple[float | None, bool]:
    """A bound, and whether it is excluded; the tighter bound if both keywords are given."""
    bounds = []
    for keyword in (name, exclusive):
        if keyword not in schema:
            continue
        value = schema[keyword]
        if not has_type(value, "number") or (isinstance(value, float) and not math.isfinite(value)):
            raise ConstraintError(f"{keyword} is a number")
        bounds.append(value)
    if not bounds:
        return None, False
    bound = tighter(bounds)
    return bound, exclusive in schema and schema[exclusive] == bound
