"""JSON schemas: those whose texts are a regular language, keyword by keyword.

A keyword either does what JSON Schema says, or is an annotation that says nothing about validity,
or is refused by name. JSON Schema is draft 2020-12, or the older draft that ``$schema`` names. What
is offered may be less than what a schema allows, never more: properties come in the order of the
schema, those that it does not name are left out, and definitions stand inside themselves only to a
stated depth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_dllm.constraints.grammar.json_drafts import as_latest, draft_named
from vllm_dllm.constraints.grammar.json_layout import WHY_NOT_ANY, Layout, short
from vllm_dllm.constraints.grammar.json_one_of import overlap
from vllm_dllm.constraints.grammar.json_references import References
from vllm_dllm.constraints.grammar.json_scalars import TYPES, has_type, scalar
from vllm_dllm.constraints.grammar.json_values import exactly
from vllm_dllm.constraints.grammar.language import NOTHING, Node, either
from vllm_dllm.constraints.limits import CompileLimits, ConstraintError

# What says nothing about validity. `discriminator` is OpenAPI's, and only a hint there as well.
ANNOTATIONS = frozenset(
    (
        *("$schema", "$id", "$comment", "$defs", "definitions", "title", "description"),
        *("default", "examples", "deprecated", "readOnly", "writeOnly", "discriminator"),
    )
)
# Keyword -> the type whose values it speaks of.
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


def json_schema(schema: Any, limits: CompileLimits, layout: Layout | None = None) -> Node:
    """Texts of JSON that satisfy a schema.

    Raises:
        ConstraintError: names the place and the keyword that is not supported, or says that the
            schema is too large.
    """
    reader = _Reader(schema, limits, layout or Layout())
    found = reader.value(schema, "$", _Place())
    if found.empty:
        raise ConstraintError(
            "the schema allows no value" + (f" within {limits.recursion} levels of recursion"
                                            if reader.cut else "")
        )  # fmt: skip
    return found


@dataclass(frozen=True)
class _Place:
    """Where a schema stands.

    Attributes:
        depth: how deep.
        inside: inside of which definitions, by their identity, and how often of each.
        begun: schemas, by their identity, that a value is held to from its first character on. Who
            comes back to one of them has written nothing.
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
        """Of a value within this one."""
        return _Place(self.depth, self.inside)


class _Reader:
    def __init__(self, root: Any, limits: CompileLimits, layout: Layout) -> None:
        self.references, self.limits, self.layout = References(root), limits, layout
        self.parts = 0
        self.cut = False
        self.known: dict[tuple[int, tuple[tuple[int, int], ...]], Node] = {}

    def value(self, schema: Any, at: str, place: _Place) -> Node:
        """Texts of one value."""
        self.parts += 1
        if self.parts > MOST_PARTS:
            raise ConstraintError(
                f"the schema has more than {MOST_PARTS} parts once its references are written out"
            )
        if place.depth > self.limits.depth:
            raise ConstraintError(f"{short(at)}: nested deeper than {self.limits.depth}")
        if schema is False:
            return NOTHING
        if schema is True:
            raise ConstraintError(f"{short(at)}: {WHY_NOT_ANY}")
        if not isinstance(schema, Mapping):
            raise ConstraintError(f"{short(at)}: a schema is an object, got {short(schema)}")
        place = place.deeper(schema)
        schema = self._latest(schema, at)
        for name, read in (
            *(("$ref", self._reference), ("const", self._enum), ("enum", self._enum)),
            *(("allOf", self._all_of), ("anyOf", self._any_of), ("oneOf", self._any_of)),
        ):
            if name in schema:
                return read(name, schema, at, place)
        return either(self._typed(name, schema, at, place) for name in types(schema, at))

    def _latest(self, schema: Mapping[str, Any], at: str) -> Mapping[str, Any]:
        """A schema whose keywords are known, with the meaning that draft 2020-12 gives them."""
        if "$schema" in schema and draft_named(schema["$schema"]) is None:
            raise ConstraintError(
                f"{short(at)}: $schema {short(schema['$schema'])} is not supported; JSON Schema's "
                "drafts from draft-04 to 2020-12 are"
            )
        for name in schema:
            if name not in OF_TYPE and name not in GENERAL and name not in ANNOTATIONS:
                raise ConstraintError(
                    f"{short(at)}: keyword {short(name)} is not supported; supported: "
                    f"{', '.join(SUPPORTED)}"
                )
        try:
            found = as_latest(schema, self.references.scope(schema).draft)
        except ConstraintError as error:
            raise ConstraintError(f"{short(at)}: {error}") from error
        return self.references.copied(found, schema)

    def _alone(self, name: str, schema: Mapping[str, Any], at: str, beside: set[str]) -> None:
        """Refuse a keyword that would have to be met together with others."""
        others = set(schema) - ANNOTATIONS - beside - {name}
        if others:
            raise ConstraintError(
                f"{short(at)}: {name} together with {', '.join(sorted(others))} is not supported"
            )

    def _reference(self, name: str, schema: Mapping[str, Any], at: str, place: _Place) -> Node:
        self._alone(name, schema, at, set())
        pointer, target = schema[name], self.references.target(schema, at)
        if id(target) in place.begun:
            raise ConstraintError(
                f"{short(at)}: $ref {short(pointer)} leads back to where it is used before any "
                "part of the value is read, which JSON Schema leaves without a meaning"
            )
        if dict(place.inside).get(id(target), 0) > self.limits.recursion:
            self.cut = True
            return NOTHING
        place = place.within(id(target))
        key = (id(target), place.inside)
        if key not in self.known:
            self.known[key] = self.value(target, pointer, place)
        return self.known[key]

    def _enum(self, name: str, schema: Mapping[str, Any], at: str, place: _Place) -> Node:
        self._alone(name, schema, at, {"type"})
        values = [schema[name]] if name == "const" else schema[name]
        if not isinstance(values, list) or not values:
            raise ConstraintError(f"{short(at)}: enum is a list of values, and not an empty one")
        allowed = types(schema, at) if "type" in schema else TYPES
        return either(
            exactly(value) for value in values if any(has_type(value, name) for name in allowed)
        )

    def _all_of(self, name: str, schema: Mapping[str, Any], at: str, place: _Place) -> Node:
        self._alone(name, schema, at, set())
        (only,) = options if len(options := _options(name, schema, at)) == 1 else (None,)
        if only is None:
            raise ConstraintError(f"{short(at)}: allOf of several schemas is not supported")
        return self.value(only, f"{at}.allOf[0]", place)

    def _any_of(self, name: str, schema: Mapping[str, Any], at: str, place: _Place) -> Node:
        """One of the options. What `oneOf` offers must belong to no two of them."""
        self._alone(name, schema, at, {"type"})
        options = _options(name, schema, at)
        if "type" in schema:
            # As vLLM's schema of all tools has it: the type outside, the rest inside.
            allowed = types(schema, at)
            options = [
                self.references.copied({"type": list(allowed), **option}, option)
                if isinstance(option, Mapping)
                else option
                for option in options
            ]
            for n, option in enumerate(options):
                if isinstance(option, Mapping) and not set(types(option, at)) <= set(allowed):
                    raise ConstraintError(
                        f"{short(at)}: {name}[{n}] has a type that the schema around it has not"
                    )
        found = [self.value(o, f"{at}.{name}[{n}]", place) for n, o in enumerate(options)]
        if name == "oneOf" and (pair := overlap(options, self.references, at)):
            raise ConstraintError(
                f"{short(at)}: oneOf is supported where no value fits two of its schemas; "
                f"numbers {pair[0]} and {pair[1]} may share some (anyOf may say the same)"
            )
        return either(found)

    def _typed(self, name: str, schema: Mapping[str, Any], at: str, place: _Place) -> Node:
        def inside(held: Any, step: str) -> Node:
            return self.value(held, f"{at}.{step}", place.part())

        if name == "object":
            return self.layout.object(schema, short(at), inside)
        if name == "array":
            return self.layout.array(schema, short(at), inside)
        return scalar(name, schema, short(at))


def types(schema: Mapping[str, Any], at: str) -> tuple[str, ...]:
    """The types that a schema names, or that its keywords speak of.

    Raises:
        ConstraintError: an unknown one, or none at all.
    """
    if "type" not in schema:
        found = {OF_TYPE[name] for name in schema if name in OF_TYPE}
        if "enum" in schema or "const" in schema or {"$ref", "anyOf", "oneOf"} & set(schema):
            return TYPES
        if not found:
            raise ConstraintError(f"{short(at)}: {WHY_NOT_ANY}")
        return tuple(sorted(found))
    named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    for name in named:
        if name not in TYPES:
            raise ConstraintError(
                f"{short(at)}: type {short(name)} is not one of {', '.join(TYPES)}"
            )
    return tuple(dict.fromkeys(named))


def _options(name: str, schema: Mapping[str, Any], at: str) -> list[Any]:
    options = schema[name]
    if not isinstance(options, list) or not options:
        raise ConstraintError(f"{short(at)}: {name} is a list of schemas, and not an empty one")
    return options
