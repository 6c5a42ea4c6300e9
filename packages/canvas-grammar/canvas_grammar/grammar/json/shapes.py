"""The keywords of JSON Schema: which values they may have, and which types they restrict."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from canvas_grammar.grammar.json.constants import whole_number
from canvas_grammar.grammar.json.layout import short

KINDS = ("null", "boolean", "string", "number", "array", "object")
TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
# Keywords that restrict values of one type.
OF_KIND: dict[str, tuple[str, ...]] = {
    "null": (),
    "boolean": (),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": (
        *("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems"),
        *("contains", "minContains", "maxContains", "unevaluatedItems"),
    ),
    "object": (
        *("properties", "patternProperties", "additionalProperties", "required", "minProperties"),
        *("maxProperties", "propertyNames", "unevaluatedProperties"),
        *("dependencies", "dependentRequired", "dependentSchemas"),
    ),
}
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
GENERAL = (
    *("type", "enum", "const", *REFERENCES),
    *("allOf", "anyOf", "oneOf", "not", "if", "then", "else"),
)
SUPPORTED = tuple(sorted({*GENERAL, *(name for names in OF_KIND.values() for name in names)}))
# Keywords that are known to say nothing about validity. `discriminator` is OpenAPI's.
ANNOTATIONS = frozenset(
    (
        *("$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$vocabulary"),
        *("$comment", "$defs", "definitions", "title", "description", "default", "examples"),
        *("deprecated", "readOnly", "writeOnly", "discriminator"),
        *("contentEncoding", "contentMediaType", "contentSchema"),
    )
)


def _is_schema(value: Any) -> bool:
    return isinstance(value, bool | Mapping)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_count(value: Any) -> bool:
    count = whole_number(value)
    return count is not None and count >= 0


def _is_list_of_schemas(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_schema, value))


def _is_table_of_schemas(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(_is_schema, value.values()))


def _are_dependencies(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        _is_schema(part) or _are_names(part) for part in value.values()
    )


def _is_type(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return all(isinstance(name, str) and name in TYPES for name in names)


Check = tuple[Callable[[Any], bool], str]
SCHEMA: Check = (_is_schema, "a schema, which is an object, true or false")
NUMBER: Check = (_is_number, "a number")
BOUND: Check = (lambda v: isinstance(v, bool) or _is_number(v), "a number (in draft-04 a flag)")
COUNT: Check = (_is_count, "a count")
TEXT: Check = (lambda v: isinstance(v, str), "a string")
SHAPES: dict[str, Check] = {
    "type": (_is_type, f"one or several of {', '.join(TYPES)}"),
    "enum": (lambda v: isinstance(v, list) and bool(v), "a list of values, and not an empty one"),
    "const": (lambda v: True, "a value"),
    **dict.fromkeys((*REFERENCES, "pattern", "format"), TEXT),
    **dict.fromkeys(
        ("allOf", "anyOf", "oneOf", "prefixItems"),
        (_is_list_of_schemas, "a list of schemas, and not an empty one"),
    ),
    **dict.fromkeys(
        (
            *("not", "if", "then", "else", "additionalProperties", "additionalItems", "contains"),
            *("propertyNames", "unevaluatedItems", "unevaluatedProperties"),
        ),
        SCHEMA,
    ),
    **dict.fromkeys(
        ("properties", "patternProperties", "dependentSchemas"),
        (_is_table_of_schemas, "an object of schemas"),
    ),
    "items": (
        lambda v: _is_schema(v) or v == [] or _is_list_of_schemas(v),
        "a schema, or up to draft-2019-09 a list of schemas",
    ),
    "dependencies": (_are_dependencies, "an object of schemas and of lists of names"),
    "dependentRequired": (
        lambda v: isinstance(v, Mapping) and all(map(_are_names, v.values())),
        "an object of lists of names",
    ),
    "required": (_are_names, "a list of names"),
    **dict.fromkeys(("minimum", "maximum"), NUMBER),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), BOUND),
    "multipleOf": (lambda v: _is_number(v) and v > 0, "a number above 0"),
    **dict.fromkeys(
        (f"{end}{what}" for end in ("min", "max")
         for what in ("Length", "Items", "Properties", "Contains")),
        COUNT,
    ),
    "uniqueItems": (lambda v: isinstance(v, bool), "true or false"),
}  # fmt: skip


def complaint(keyword: str, value: Any) -> str | None:
    """What is wrong with the value of a keyword, or None."""
    fits, wanted = SHAPES[keyword]
    return None if fits(value) else f"{keyword} is {wanted}, got {short(value)}"
