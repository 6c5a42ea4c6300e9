"""Whether a value may fit two of the schemas of a `oneOf`: sure answers only."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

from vllm_dllm.constraints.json_scalars import TYPES, has_type

Resolve = Callable[[Any], Any]
MOST_STEPS = 32


def overlap(options: Sequence[Any], resolve: Resolve) -> tuple[int, int] | None:
    """The first two options, counted from 0, that may share a value; None when none do.

    They surely share none when their types differ, their constants differ, or when both demand
    a property whose constants differ (the usual discriminator).

    Args:
        options: schemas.
        resolve: the schema that a ``$ref`` names.
    """
    found = [_followed(option, resolve) for option in options]
    for (i, one), (j, other) in combinations(enumerate(found), 2):
        if not _apart(one, other, resolve):
            return i, j
    return None


def _followed(schema: Any, resolve: Resolve) -> Any:
    """Behind references and lists of a single schema."""
    for _ in range(MOST_STEPS):
        if not isinstance(schema, Mapping):
            return schema
        if "$ref" in schema:
            schema = resolve(schema["$ref"])
        elif isinstance(schema.get("allOf"), list) and len(schema["allOf"]) == 1:
            (schema,) = schema["allOf"]
        else:
            return schema
    return {}


def _apart(one: Any, other: Any, resolve: Resolve) -> bool:
    if one is False or other is False:
        return True
    if not isinstance(one, Mapping) or not isinstance(other, Mapping):
        return False
    values, more = _constants(one), _constants(other)
    if values is not None and more is not None:
        return not {_same(v) for v in values} & {_same(v) for v in more}
    if values is not None or more is not None:
        schema = one if values is None else other
        given = more if values is None else values
        return not any(has_type(v, name) for v in given or [] for name in _types(schema))
    if not _types(one) & _types(other):
        return True
    if _types(one) & _types(other) != {"object"}:
        return False
    shared = set(one.get("required", [])) & set(other.get("required", []))
    return any(
        _apart_constants(one.get("properties"), other.get("properties"), name, resolve)
        for name in shared
    )


def _apart_constants(one: Any, other: Any, name: str, resolve: Resolve) -> bool:
    """Whether a property has constants in both, and none in common."""
    found = []
    for properties in (one, other):
        schema = properties.get(name) if isinstance(properties, Mapping) else None
        schema = _followed(schema, resolve)
        values = _constants(schema) if isinstance(schema, Mapping) else None
        if values is None:
            return False
        found.append({_same(value) for value in values})
    return not found[0] & found[1]


def _constants(schema: Mapping[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _types(schema: Mapping[str, Any]) -> set[str]:
    """Types that values of the schema may have; a schema that names none may have any."""
    named = schema.get("type", list(TYPES))
    found = {named} if isinstance(named, str) else set(named)
    return found | {"integer"} if "number" in found else found


def _same(value: Any) -> str:
    """The same text for values that JSON Schema takes for equal: 1 and 1.0 are, 1 and true not."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, list):
        return f"[{','.join(_same(part) for part in value)}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{json.dumps(k)}:{_same(value[k])}' for k in sorted(value))}}}"
    return json.dumps(value)
