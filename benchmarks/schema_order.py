"""Instances of schemas, with their properties in the order in which they are offered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

MOST_STEPS = 64


def in_order(schema: Any, value: Any, root: Any = None) -> Any:
    """The value, with the properties that a schema names first, in its order."""
    return _ordered([schema], value, schema if root is None else root)


def _ordered(schemas: list[Any], value: Any, root: Any) -> Any:
    parts = [part for schema in schemas for part in _applied(schema, root, MOST_STEPS)]
    if isinstance(value, list):
        return [_ordered(list(_of_item(parts, n)), item, root) for n, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    named = dict.fromkeys(
        name for part in parts for name in part.get("properties", {}) if name in value
    )
    named |= dict.fromkeys(
        name for part in parts for name in part.get("required", []) if name in value
    )
    names = [*named, *(name for name in value if name not in named)]
    return {name: _ordered(list(_of_property(parts, name)), value[name], root) for name in names}


def _applied(schema: Any, root: Any, steps: int) -> Iterator[Any]:
    """A schema, and those that it applies to the same value."""
    if not isinstance(schema, dict) or steps < 0:
        return
    yield schema
    target = _target(schema.get("$ref"), root)
    inside = [target] if target is not None else []
    for name in ("allOf", "anyOf", "oneOf"):
        some = schema.get(name)
        inside += some if isinstance(some, list) else []
    inside += [schema[name] for name in ("if", "then", "else") if name in schema]
    inside += list(schema.get("dependentSchemas", {}).values())
    inside += list(schema.get("dependencies", {}).values())
    for part in inside:
        yield from _applied(part, root, steps - 8)


def _target(pointer: Any, root: Any) -> Any:
    if not isinstance(pointer, str) or not pointer.startswith("#"):
        return None
    target = root
    for step in pointer.split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if not isinstance(target, dict) or step not in target:
            return None
        target = target[step]
    return target


def _of_item(parts: list[Any], n: int) -> Iterator[Any]:
    for part in parts:
        for name in ("prefixItems", "items"):
            items = part.get(name)
            if isinstance(items, list):
                yield from items[n : n + 1]
            elif isinstance(items, dict):
                yield items


def _of_property(parts: list[Any], name: str) -> Iterator[Any]:
    for part in parts:
        properties = part.get("properties", {})
        if name in properties:
            yield properties[name]
        elif isinstance(part.get("additionalProperties"), dict):
            yield part["additionalProperties"]
        yield from part.get("patternProperties", {}).values()
