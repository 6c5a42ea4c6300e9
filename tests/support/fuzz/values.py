"""The values that fuzzing gives to a field: extremes of its type, and what is no value of it.

A field's type is what the server's own description (``/openapi.json``) says of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

# Widths of integers that numbers end up in: bytes to 64 bits, and what a float holds exactly.
WIDTHS = (8, 16, 31, 32, 53, 63, 64)
INTEGERS: tuple[int, ...] = (
    *(0, 1, -1, 2, 271, 272, 512, 513),
    *(sign * 2**width + step for width in WIDTHS for sign, step in ((1, -1), (1, 0))),
    *(sign * 2**width + step for width in WIDTHS[1:] for sign, step in ((-1, 0), (-1, -1))),
    *(10**40, -(10**40), 10**400),
)
FLOATS: tuple[float, ...] = (
    *(0.0, -0.0, 0.5, -0.5, 1.0, 1.5, 2.0, math.nan, math.inf, -math.inf),
    *(5e-324, -5e-324, 2.2e-308, 1.7976931348623157e308, -1.7976931348623157e308),
    # The least and the largest of float32, and their neighbours on the far side.
    *(1.4e-45, 1e-46, 1.1754944e-38, 3.4028235e38, 3.4028236e38, -3.5e38, 1e39),
    *(65504.0, 65520.0, 6e-8, 0.9999999999999999, 1.0000000000000002),
)
LONG = "copy ab " * 2000
TEXTS: tuple[str, ...] = ("", " ", "\0", "x", "nan", "1", "é" * 200, "🙂", LONG, "\ud800", "os:x")
ANYTHING: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**63, -(2**63) - 1, 1.5, math.nan, "", "x", LONG, "\ud800"),
    *([], [[]], [None], [0], [-1], [2**63], [math.nan], [""], ["x", "x"], [{}], ["\ud800"]),
    *({}, {"": 0}, {"a": None}, {"a": 2**63}, {"5": math.nan}, {"type": "x"}, {"a": {"a": []}}),
)
# An object whose keys are token ids, or names.
OBJECTS: tuple[Any, ...] = (
    *({"5": value} for value in FLOATS),
    *({str(value): 1.0} for value in INTEGERS),
    {str(token): -1e30 for token in range(272)},
    {str(token): -100 for token in range(272)},
)
LONGEST = [1] * 70_000
LISTS = {
    "integer": (*([value] for value in INTEGERS), list(range(272)), LONGEST),
    "number": (*([value] for value in FLOATS), LONGEST),
    "string": (*([text] for text in TEXTS), ["x"] * 1000),
    "array": tuple([[value]] for value in INTEGERS),
}


def values_for(schema: Mapping[str, Any]) -> list[Any]:
    """Extremes for every kind of value that a field takes, and a few that it does not.

    Args:
        schema: the field's part of an OpenAPI document, references resolved.
    """
    found: list[Any] = []
    for kind in kinds_of(schema):
        if kind == "integer":
            found += [*INTEGERS, math.nan, math.inf, 0.5, 1e39, "1"]
        elif kind == "number":
            found += [*FLOATS, *INTEGERS[-9:], 0, 1, -1, "0.5"]
        elif kind == "string":
            found += TEXTS
        elif kind.startswith("array of "):
            found += LISTS.get(kind.removeprefix("array of "), ())
        elif kind == "object":
            found += OBJECTS
    found += schema.get("enum", [])
    return found + [value for value in ANYTHING if not any(_same(value, one) for one in found)]


def kinds_of(schema: Mapping[str, Any]) -> list[str]:
    """The types that a field takes, in the words of JSON; ``array of`` for a list's items."""
    for union in ("anyOf", "oneOf", "allOf"):
        if union in schema:
            found = [kind for one in schema[union] for kind in kinds_of(one)]
            return list(dict.fromkeys(found))
    kind = schema.get("type")
    if kind == "array":
        return [f"array of {item}" for item in kinds_of(schema.get("items", {}))] or ["array of "]
    return [kind] if isinstance(kind, str) else []


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and repr(one) == repr(other)
