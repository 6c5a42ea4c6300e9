"""How a JSON value may be written."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

COMPACT, SPACED = (",", ":"), (", ", ": ")
IN_PLACE = ("allOf", "anyOf", "oneOf")
DEEPEST = 100


def offered_spellings(value: Any, schema: Any) -> list[str]:
    """Spellings of a valid value of which one should be offered: keys as the schema orders them."""
    orders = (_ordered(value, [schema], schema, 0), value)
    styles = (COMPACT, SPACED)
    return _different(
        json.dumps(each, separators=style, ensure_ascii=False)
        for style in styles
        for each in orders
    )


def all_spellings(value: Any, schema: Any) -> list[str]:
    """More spellings: none of an invalid value may be accepted."""
    ordered = (_ordered(value, [schema], schema, 0), value)
    return _different(
        json.dumps(each, separators=style, ensure_ascii=ascii)
        for style in (COMPACT, SPACED)
        for ascii in (False, True)
        for each in ordered
    )


def _different(texts: Iterator[str]) -> list[str]:
    return [text for text in dict.fromkeys(texts) if _is_text(text)]


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate, which only an escape can spell
        return False
    return True


def _ordered(value: Any, schemas: list[Any], root: Any, depth: int) -> Any:
    """The value with its keys in the order in which its schemas name them, then the others."""
    schemas = [part for schema in schemas for part in _at_the_same_place(schema, root, 0)]
    if isinstance(value, list) and depth < DEEPEST:
        return [
            _ordered(item, _of_item(schemas, place), root, depth + 1)
            for place, item in enumerate(value)
        ]
    if not isinstance(value, dict) or depth >= DEEPEST:
        return value
    named = [name for schema in schemas for name in _mapping(schema, "properties")]
    names = [name for name in dict.fromkeys([*named, *value]) if name in value]
    return {name: _ordered(value[name], _of_name(schemas, name), root, depth + 1) for name in names}


def _at_the_same_place(schema: Any, root: Any, depth: int) -> Iterator[Mapping[str, Any]]:
    """The schema and those that apply to the same value, in the order in which they are written."""
    if not isinstance(schema, Mapping) or depth > DEEPEST:
        return
    yield schema
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        yield from _at_the_same_place(_target(reference, root), root, depth + 1)
    for keyword in IN_PLACE:
        options = schema.get(keyword)
        for option in options if isinstance(options, list) else []:
            yield from _at_the_same_place(option, root, depth + 1)
    for keyword in ("then", "else", "if"):
        yield from _at_the_same_place(schema.get(keyword), root, depth + 1)


def _target(reference: str, root: Any) -> Any:
    found = root
    for step in reference.split("/")[1:]:
        step = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and step.isdigit() and int(step) < len(found):
            found = found[int(step)]
        elif isinstance(found, Mapping):
            found = found.get(step)
        else:
            return None
    return found


def _mapping(schema: Mapping[str, Any], keyword: str) -> Mapping[str, Any]:
    found = schema.get(keyword)
    return found if isinstance(found, Mapping) else {}


def _of_name(schemas: list[Any], name: str) -> list[Any]:
    found = [part[name] for s in schemas if name in (part := _mapping(s, "properties"))]
    return found or [s["additionalProperties"] for s in schemas if "additionalProperties" in s]


def _of_item(schemas: list[Any], place: int) -> list[Any]:
    found = []
    for schema in schemas:
        items = schema.get("items")
        for parts in (schema.get("prefixItems"), items):
            if isinstance(parts, list) and place < len(parts):
                found.append(parts[place])
        if isinstance(items, Mapping):
            found.append(items)
    return found
