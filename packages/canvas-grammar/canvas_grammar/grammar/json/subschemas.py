"""Parts of a schema: single schemas, with their surroundings, and conditions made of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from typing import Any, NamedTuple

from referencing import Specification
from referencing._core import Resolver
from referencing.jsonschema import DRAFT4, DRAFT6, DRAFT7, DRAFT201909, DRAFT202012

from canvas_grammar.grammar.json.values import identity, short, whole_number
from canvas_grammar.limits import ConstraintError

# ---- Drafts of JSON Schema: which one a schema is written in, and which keywords each of them has.


class Draft(IntEnum):
    """The drafts, in the order of their publication."""

    DRAFT_04 = 4
    DRAFT_06 = 6
    DRAFT_07 = 7
    DRAFT_2019_09 = 2019
    DRAFT_2020_12 = 2020

    @property
    def title(self) -> str:
        """The usual spelling of its name."""
        return self.name.lower().replace("_", "-")


LATEST = Draft.DRAFT_2020_12
DRAFT_OF_URL = {
    "json-schema.org/draft-04/schema": Draft.DRAFT_04,
    "json-schema.org/draft-06/schema": Draft.DRAFT_06,
    "json-schema.org/draft-07/schema": Draft.DRAFT_07,
    "json-schema.org/draft/2019-09/schema": Draft.DRAFT_2019_09,
    "json-schema.org/draft/2020-12/schema": LATEST,
    "json-schema.org/schema": LATEST,
    # OpenAPI's dialect only adds annotations.
    "spec.openapis.org/oas/3.1/dialect/base": LATEST,
}
SPECIFICATIONS: dict[Draft, Specification[Any]] = {
    Draft.DRAFT_04: DRAFT4,
    Draft.DRAFT_06: DRAFT6,
    Draft.DRAFT_07: DRAFT7,
    Draft.DRAFT_2019_09: DRAFT201909,
    Draft.DRAFT_2020_12: DRAFT202012,
}
# Keywords that not all drafts have: the first draft, and the last one.
OF_SOME_DRAFTS = {
    **dict.fromkeys(("const", "contains", "propertyNames"), (Draft.DRAFT_06, LATEST)),
    **dict.fromkeys(("if", "then", "else"), (Draft.DRAFT_07, LATEST)),
    "dependencies": (Draft.DRAFT_04, Draft.DRAFT_07),
    "additionalItems": (Draft.DRAFT_04, Draft.DRAFT_2019_09),
    **dict.fromkeys(("dependentRequired", "dependentSchemas"), (Draft.DRAFT_2019_09, LATEST)),
    **dict.fromkeys(("minContains", "maxContains"), (Draft.DRAFT_2019_09, LATEST)),
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties"), (Draft.DRAFT_2019_09, LATEST)),
    "$recursiveRef": (Draft.DRAFT_2019_09, Draft.DRAFT_2019_09),
    **dict.fromkeys(("prefixItems", "$dynamicRef"), (LATEST, LATEST)),
}


def draft_named(name: Any) -> Draft | None:
    """The draft that a ``$schema`` names, or None if it is unknown."""
    place = str(name).removeprefix("http://").removeprefix("https://")
    return DRAFT_OF_URL.get(place.removesuffix("#"))


def has_keyword(draft: Draft, keyword: str) -> bool:
    """Whether a keyword that restricts values belongs to a draft."""
    first, last = OF_SOME_DRAFTS.get(keyword, (Draft.DRAFT_04, LATEST))
    return first <= draft <= last


# ---- The keywords of JSON Schema: which values they may have, and which types they restrict.

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


def _is_table(value: Any, *contents: Callable[[Any], bool]) -> bool:
    """Whether it is an object whose values are of one of some kinds."""
    return isinstance(value, Mapping) and all(
        any(fits(inside) for fits in contents) for inside in value.values()
    )


def _is_type(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return all(isinstance(name, str) and name in TYPES for name in names)


Check = tuple[Callable[[Any], bool], str]
SHAPES: dict[str, Check] = {
    "type": (_is_type, f"one or several of {', '.join(TYPES)}"),
    "enum": (lambda v: isinstance(v, list) and bool(v), "a list of values, and not an empty one"),
    "const": (lambda v: True, "a value"),
    **dict.fromkeys(
        (*REFERENCES, "pattern", "format"), (lambda v: isinstance(v, str), "a string")
    ),
    **dict.fromkeys(
        ("allOf", "anyOf", "oneOf", "prefixItems"),
        (_is_list_of_schemas, "a list of schemas, and not an empty one"),
    ),
    **dict.fromkeys(
        (
            *("not", "if", "then", "else", "additionalProperties", "additionalItems", "contains"),
            *("propertyNames", "unevaluatedItems", "unevaluatedProperties"),
        ),
        (_is_schema, "a schema, which is an object, true or false"),
    ),
    **dict.fromkeys(
        ("properties", "patternProperties", "dependentSchemas"),
        (lambda v: _is_table(v, _is_schema), "an object of schemas"),
    ),
    "items": (
        lambda v: _is_schema(v) or v == [] or _is_list_of_schemas(v),
        "a schema, or up to draft-2019-09 a list of schemas",
    ),
    "dependencies": (
        lambda v: _is_table(v, _is_schema, _are_names),
        "an object of schemas and of lists of names",
    ),
    "dependentRequired": (lambda v: _is_table(v, _are_names), "an object of lists of names"),
    "required": (_are_names, "a list of names"),
    **dict.fromkeys(("minimum", "maximum"), (_is_number, "a number")),
    **dict.fromkeys(
        ("exclusiveMinimum", "exclusiveMaximum"),
        (lambda v: isinstance(v, bool) or _is_number(v), "a number (in draft-04 a flag)"),
    ),
    "multipleOf": (lambda v: _is_number(v) and v > 0, "a number above 0"),
    **dict.fromkeys(
        (f"{end}{what}" for end in ("min", "max")
         for what in ("Length", "Items", "Properties", "Contains")),
        (_is_count, "a count"),
    ),
    "uniqueItems": (lambda v: isinstance(v, bool), "true or false"),
}  # fmt: skip


SILENT: Mapping[str, Any] = {}
# Keywords of later drafts are obeyed in earlier ones, where they do not count: that only leaves out
# values. These may add some.
RELAXING = ("minContains", "maxContains")


@dataclass(frozen=True)
class Surroundings:
    """The surroundings of a schema: what it inherits from its document."""

    resolver: Resolver[Any]  # what its references mean
    draft: Draft  # that of its keywords
    declared: bool  # whether a ``$schema`` names the draft
    # By keyword, the first place of each that is ignored in the whole document.
    ignored: dict[str, str] = field(compare=False)
    # Those of the whole document, by the `id()` of their values.
    subschemas: dict[int, Subschema] = field(compare=False)

    def inside(self, schema: Mapping[str, Any], place: str) -> Surroundings:
        """Of a schema that is in these surroundings; an unknown ``$schema`` is refused."""
        draft, declared, resolver = self.draft, self.declared, self.resolver
        if "$schema" in schema:
            named = draft_named(schema["$schema"])
            if named is None:
                raise ConstraintError(
                    f"{short(place)}: $schema {short(schema['$schema'])} is not supported; JSON "
                    "Schema's drafts from draft-04 to 2020-12 are"
                )
            draft, declared = named, True
        if isinstance(schema.get("id" if draft is Draft.DRAFT_04 else "$id"), str):
            resolver = resolver.in_subresource(SPECIFICATIONS[draft].create_resource(schema))
        if resolver is self.resolver and (draft, declared) == (self.draft, self.declared):
            return self
        return Surroundings(resolver, draft, declared, self.ignored, self.subschemas)


class Subschema:
    """A schema (an object, true or false) at a place of the document, known by its identity."""

    def __init__(self, value: Any, place: str, around: Surroundings) -> None:
        if not isinstance(value, bool | Mapping):
            raise ConstraintError(f"{short(place)}: a schema is an object, got {short(value)}")
        self.value, self.place = value, place
        self.around = around.inside(value, place) if isinstance(value, Mapping) else around
        self.layer: Any = None  # what `facts` has made of its properties
        self._children: dict[tuple[str | int, ...], Subschema] = {}

    @classmethod
    def at(cls, value: Any, place: str, around: Surroundings) -> Subschema:
        """The subschema of a schema of the document: one, whatever leads to it."""
        if isinstance(value, bool):
            return cls(value, place, around)
        if id(value) not in around.subschemas:
            around.subschemas[id(value)] = cls(value, place, around)
        return around.subschemas[id(value)]

    def child(self, *steps: str | int) -> Subschema:
        """The subschema at the end of some steps."""
        if steps not in self._children:
            value: Any = self.value
            for step in steps:
                value = value[step]
            place = f"{self.place}.{_written(steps)}"
            self._children[steps] = Subschema.at(value, place, self.around)
        return self._children[steps]

    def constant(self, value: Any) -> Subschema:
        """A subschema that allows one value, in the same place: one for each value."""
        steps = ("const", identity(value))
        if steps not in self._children:
            # In the latest draft, because draft-04 has no constants.
            around = replace(self.around, draft=Draft.DRAFT_2020_12)
            self._children[steps] = Subschema({"const": value}, self.place, around)
        return self._children[steps]

    @cached_property
    def keywords(self) -> Mapping[str, Any]:
        """The keywords that restrict values, also those of other drafts than the subschema's own.

        A value that a keyword cannot have is refused.
        """
        if isinstance(self.value, bool):
            return SILENT
        if "$ref" in self.value and self.around.draft <= Draft.DRAFT_07 and self.around.declared:
            self._checked("$ref")
            for name in self.value:
                if name != "$ref" and name in SHAPES:
                    self._ignored(name, " (up to draft-07, nothing counts beside $ref)")
            return {"$ref": self.value["$ref"]}
        words = {}
        draft, declared = self.around.draft, self.around.declared
        if declared and draft < Draft.DRAFT_2020_12 and {"items", "prefixItems"} <= set(self.value):
            raise self.complain(
                f"prefixItems beside items is of draft-2020-12, and $schema says {draft.title}, "
                "where items are all items"
            )
        for name in self.value:
            if name in RELAXING and not has_keyword(draft, name):
                self._ignored(name, f" (not a keyword of {draft.title})")
            elif name in SHAPES:
                words[name] = self._checked(name)
            elif name not in ANNOTATIONS:
                self._ignored(name, "")
        return words

    @cached_property
    def certain(self) -> Mapping[str, Any]:
        """The keywords that are of the subschema's own draft."""
        draft = self.around.draft
        return {name: v for name, v in self.keywords.items() if has_keyword(draft, name)}

    @cached_property
    def types(self) -> frozenset[str] | None:
        """The types that it names, or None."""
        if (named := self.keywords.get("type")) is None:
            return None
        return frozenset([named] if isinstance(named, str) else named)

    def allows(self, kind: str) -> bool:
        """Whether values of one of the six types of JSON are not excluded by ``type``."""
        if isinstance(self.value, bool):
            return self.value
        types = self.types
        return types is None or kind in types or (kind == "number" and "integer" in types)

    @property
    def trivial(self) -> bool:
        """Whether it allows every value."""
        return self.value is True or (self.value is not False and not self.keywords)

    def complain(self, problem: object) -> ConstraintError:
        """An error that names the subschema's place."""
        return ConstraintError(f"{short(self.place)}: {problem}")

    def _checked(self, name: str) -> Any:
        assert isinstance(self.value, Mapping)
        value, around = self.value[name], self.around
        fits, wanted = SHAPES[name]
        problem = None if fits(value) else f"{name} is {wanted}, got {short(value)}"
        if problem is None and around.declared:
            if name in ("exclusiveMinimum", "exclusiveMaximum"):
                flag = around.draft is Draft.DRAFT_04
                if isinstance(value, bool) != flag:
                    problem = f"{name} is {'true or false' if flag else 'a number'}"
                    problem += f" in {around.draft.title}, got {short(value)}"
            elif name == "items" and isinstance(value, list) and around.draft > 2019:
                problem = f"items is one schema in {around.draft.title}"
        if problem is not None:
            raise self.complain(problem)
        return value

    def _ignored(self, name: str, why: str) -> None:
        self.around.ignored.setdefault(name, f"{short(self.place)}: {short(name)}{why}")


class Literal(NamedTuple):
    """A condition on a value: that a subschema holds, or that it does not."""

    subschema: Subschema
    negated: bool = False

    @property
    def opposite(self) -> Literal:
        """The condition that holds where this one does not."""
        return Literal(self.subschema, not self.negated)

    @property
    def certain(self) -> bool:
        """Whether every value meets it."""
        return self.subschema.value is False if self.negated else self.subschema.trivial

    @property
    def hopeless(self) -> bool:
        """Whether it is clear that no value meets it."""
        return self.subschema.trivial if self.negated else self.subschema.value is False


def _written(steps: tuple[str | int, ...]) -> str:
    """The steps of a message: ``anyOf[0]``, and the name of a property without ``properties``."""
    if len(steps) == 2:
        return f"{steps[0]}[{steps[1]}]" if isinstance(steps[1], int) else str(steps[1])
    return str(steps[0])


def unique(literals: Iterable[Literal]) -> tuple[Literal, ...]:
    """Literals without repetitions, and without those that every value meets."""
    return tuple(dict.fromkeys(literal for literal in literals if not literal.certain))


def place_of(literals: tuple[Literal, ...]) -> str:
    """Where conditions on a value are, for messages; the whole document where there are none."""
    return literals[0].subschema.place if literals else "$"
