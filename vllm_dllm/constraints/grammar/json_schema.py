"""JSON schemas whose texts are a regular language, keyword by keyword.

A keyword either does what JSON Schema says, or is an annotation that does not affect validity, or
is refused by name. JSON Schema means draft 2020-12, or the older draft that ``$schema`` names. The
texts that are offered may be fewer than those that a schema allows, but never more: properties come
in the order of the schema, properties that it does not name are left out, and definitions contain
themselves only to a limited depth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_dllm.constraints.grammar.json_drafts import as_latest, draft_named
from vllm_dllm.constraints.grammar.json_layout import WHY_NOT_ANY, JsonLayout, short
from vllm_dllm.constraints.grammar.json_one_of import first_overlap
from vllm_dllm.constraints.grammar.json_references import References
from vllm_dllm.constraints.grammar.json_scalars import TYPES, has_type, scalar
from vllm_dllm.constraints.grammar.json_values import json_literal
from vllm_dllm.constraints.grammar.language import NOTHING, Node, either
from vllm_dllm.constraints.limits import CompileLimits, ConstraintError

# Keywords that do not affect validity. `discriminator` is OpenAPI's, where it is only a hint too.
ANNOTATIONS = frozenset(
    (
        *("$schema", "$id", "$comment", "$defs", "definitions", "title", "description"),
        *("default", "examples", "deprecated", "readOnly", "writeOnly", "discriminator"),
    )
)
# From a keyword to the type whose values it restricts.
OF_TYPE = {
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format"), "string"),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), "number"),
    **dict.fromkeys(("items", "prefixItems", "minItems", "maxItems", "uniqueItems"), "array"),
    **dict.fromkeys(("properties", "required", "additionalProperties"), "object"),
    **dict.fromkeys(("minProperties", "maxProperties"), "object"),
}
GENERAL = frozenset(("type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref"))
SUPPORTED = tuple(sorted(GENERAL | set(OF_TYPE)))
MOST_PARTS = 20_000


def json_schema(schema: Any, limits: CompileLimits, layout: JsonLayout | None = None) -> Node:
    """The language of the JSON texts that satisfy a schema.

    Raises:
        ConstraintError: the schema is too large, or a keyword is not supported; the message then
            names the keyword and its place.
    """
    reader = _SchemaReader(schema, limits, layout or JsonLayout())
    language = reader.value(schema, "$", _Place())
    if language.empty:
        raise ConstraintError(
            "the schema allows no value" + (f" within {limits.calls} levels of recursion"
                                            if reader.cut else "")
        )  # fmt: skip
    return language


@dataclass(frozen=True)
class _Place:
    """The position of a schema in the traversal of a document.

    Attributes:
        depth: how deeply it is nested.
        inside: the definitions that it is inside of, by `id()`, and how often it is inside of each.
        begun: schemas, by `id()`, that apply to the same value as this one. A reference back to one
            of them would be circular, because no character of the value is read in between.
    """

    depth: int = 0
    inside: tuple[tuple[int, int], ...] = ()
    begun: frozenset[int] = frozenset()

    def deeper(self, schema: Any) -> _Place:
        return _Place(self.depth + 1, self.inside, self.begun | {id(schema)})

    def within(self, definition: int) -> _Place:
        counts = dict(self.inside)
        counts[definition] = counts.get(definition, 0) + 1
        return _Place(self.depth, tuple(sorted(counts.items())), self.begun)

    def part(self) -> _Place:
        """The position of a schema for a part of the value."""
        return _Place(self.depth, self.inside)


class _SchemaReader:
    """Reads the schemas of one document."""

    def __init__(self, root: Any, limits: CompileLimits, layout: JsonLayout) -> None:
        self.references, self.limits, self.layout = References(root), limits, layout
        self.parts = 0
        self.cut = False
        self.read_definitions: dict[tuple[int, tuple[tuple[int, int], ...]], Node] = {}

    def value(self, schema: Any, path: str, place: _Place) -> Node:
        """The language of the values of a schema; `path` is its place, for messages."""
        self.parts += 1
        if self.parts > MOST_PARTS:
            raise ConstraintError(
                f"the schema has more than {MOST_PARTS} parts once its references are written out"
            )
        if place.depth > self.limits.depth:
            raise ConstraintError(f"{short(path)}: nested deeper than {self.limits.depth}")
        if schema is False:
            return NOTHING
        if schema is True:
            raise ConstraintError(f"{short(path)}: {WHY_NOT_ANY}")
        if not isinstance(schema, Mapping):
            raise ConstraintError(f"{short(path)}: a schema is an object, got {short(schema)}")
        place = place.deeper(schema)
        schema = self._latest(schema, path)
        for name, read in (
            *(("$ref", self._reference), ("const", self._enum), ("enum", self._enum)),
            *(("allOf", self._all_of), ("anyOf", self._any_of), ("oneOf", self._any_of)),
        ):
            if name in schema:
                return read(name, schema, path, place)
        return either(self._typed(name, schema, path, place) for name in types(schema, path))

    def _latest(self, schema: Mapping[str, Any], path: str) -> Mapping[str, Any]:
        """The schema as draft 2020-12 writes it, after a check that all its keywords are known."""
        if "$schema" in schema and draft_named(schema["$schema"]) is None:
            raise ConstraintError(
                f"{short(path)}: $schema {short(schema['$schema'])} is not supported; JSON "
                "Schema's drafts from draft-04 to 2020-12 are"
            )
        for name in schema:
            if name not in OF_TYPE and name not in GENERAL and name not in ANNOTATIONS:
                raise ConstraintError(
                    f"{short(path)}: keyword {short(name)} is not supported; supported: "
                    f"{', '.join(SUPPORTED)}"
                )
        try:
            latest = as_latest(schema, self.references.scope(schema).draft)
        except ConstraintError as error:
            raise ConstraintError(f"{short(path)}: {error}") from error
        return self.references.copied(latest, schema)

    def _alone(self, name: str, schema: Mapping[str, Any], path: str, beside: set[str]) -> None:
        """Refuse other keywords in the same schema, except those in `beside`."""
        others = set(schema) - ANNOTATIONS - beside - {name}
        if others:
            raise ConstraintError(
                f"{short(path)}: {name} together with {', '.join(sorted(others))} is not supported"
            )

    def _reference(self, name: str, schema: Mapping[str, Any], path: str, place: _Place) -> Node:
        self._alone(name, schema, path, set())
        pointer, target = schema[name], self.references.target(schema, path)
        if id(target) in place.begun:
            raise ConstraintError(
                f"{short(path)}: $ref {short(pointer)} leads back to where it is used before any "
                "part of the value is read, which JSON Schema leaves without a meaning"
            )
        if dict(place.inside).get(id(target), 0) > self.limits.calls:
            self.cut = True
            return NOTHING
        place = place.within(id(target))
        key = (id(target), place.inside)
        if key not in self.read_definitions:
            self.read_definitions[key] = self.value(target, pointer, place)
        return self.read_definitions[key]

    def _enum(self, name: str, schema: Mapping[str, Any], path: str, place: _Place) -> Node:
        self._alone(name, schema, path, {"type"})
        values = [schema[name]] if name == "const" else schema[name]
        if not isinstance(values, list) or not values:
            raise ConstraintError(f"{short(path)}: enum is a list of values, and not an empty one")
        allowed = types(schema, path) if "type" in schema else TYPES
        return either(
            json_literal(value)
            for value in values
            if any(has_type(value, name) for name in allowed)
        )

    def _all_of(self, name: str, schema: Mapping[str, Any], path: str, place: _Place) -> Node:
        self._alone(name, schema, path, set())
        (only,) = options if len(options := _options(name, schema, path)) == 1 else (None,)
        if only is None:
            raise ConstraintError(f"{short(path)}: allOf of several schemas is not supported")
        return self.value(only, f"{path}.allOf[0]", place)

    def _any_of(self, name: str, schema: Mapping[str, Any], path: str, place: _Place) -> Node:
        """The union of the options; for `oneOf`, no two of them may share a value."""
        self._alone(name, schema, path, {"type"})
        options = _options(name, schema, path)
        if "type" in schema:
            # vLLM's schema of all tools is like this: the type outside, the rest inside.
            allowed = types(schema, path)
            options = [
                self.references.copied({"type": list(allowed), **option}, option)
                if isinstance(option, Mapping)
                else option
                for option in options
            ]
            for n, option in enumerate(options):
                if isinstance(option, Mapping) and not set(types(option, path)) <= set(allowed):
                    raise ConstraintError(
                        f"{short(path)}: {name}[{n}] has a type that the schema around it has not"
                    )
        languages = [self.value(o, f"{path}.{name}[{n}]", place) for n, o in enumerate(options)]
        if name == "oneOf" and (pair := first_overlap(options, self.references, path)):
            raise ConstraintError(
                f"{short(path)}: oneOf is supported where no value fits two of its schemas; "
                f"numbers {pair[0]} and {pair[1]} may share some (anyOf may say the same)"
            )
        return either(languages)

    def _typed(self, name: str, schema: Mapping[str, Any], path: str, place: _Place) -> Node:
        def inside(subschema: Any, step: str) -> Node:
            return self.value(subschema, f"{path}.{step}", place.part())

        if name == "object":
            return self.layout.object(schema, short(path), inside)
        if name == "array":
            return self.layout.array(schema, short(path), inside)
        return scalar(name, schema, short(path))


def types(schema: Mapping[str, Any], path: str) -> tuple[str, ...]:
    """The types that a schema names, or that its keywords restrict.

    Raises:
        ConstraintError: a type is unknown, or there is none.
    """
    if "type" not in schema:
        restricted = {OF_TYPE[name] for name in schema if name in OF_TYPE}
        if "enum" in schema or "const" in schema or {"$ref", "anyOf", "oneOf"} & set(schema):
            return TYPES
        if not restricted:
            raise ConstraintError(f"{short(path)}: {WHY_NOT_ANY}")
        return tuple(sorted(restricted))
    named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    for name in named:
        if name not in TYPES:
            raise ConstraintError(
                f"{short(path)}: type {short(name)} is not one of {', '.join(TYPES)}"
            )
    return tuple(dict.fromkeys(named))


def _options(name: str, schema: Mapping[str, Any], path: str) -> list[Any]:
    options = schema[name]
    if not isinstance(options, list) or not options:
        raise ConstraintError(f"{short(path)}: {name} is a list of schemas, and not an empty one")
    return options
