"""Parts of a schema: single schemas, with their surroundings, and conditions made of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from referencing._core import Resolver

from canvas_grammar.grammar.json.constants import identity
from canvas_grammar.grammar.json.drafts import (
    SPECIFICATIONS,
    Draft,
    draft_named,
    has_keyword,
)
from canvas_grammar.grammar.json.layout import short
from canvas_grammar.grammar.json.shapes import ANNOTATIONS, SHAPES, complaint
from canvas_grammar.limits import ConstraintError

SILENT: Mapping[str, Any] = {}
# Keywords of later drafts are obeyed in earlier ones, where they do not count: that only leaves out
# values. These may add some.
RELAXING = ("minContains", "maxContains")


@dataclass(frozen=True)
class Surroundings:
    """What a schema takes over from the document that it is in.

    Attributes:
        resolver: what its references mean.
        draft: the draft of its keywords.
        declared: whether a ``$schema`` names the draft.
        ignored: by keyword, the first place of each that is ignored, of the whole document.
        parts: the parts of the document, by the `id()` of their values.
    """

    resolver: Resolver[Any]
    draft: Draft
    declared: bool
    ignored: dict[str, str] = field(compare=False)
    parts: dict[int, Part] = field(compare=False)

    def inside(self, schema: Mapping[str, Any], place: str) -> Surroundings:
        """Of a schema that is in these surroundings.

        Raises:
            ConstraintError: its ``$schema`` is unknown.
        """
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
        return Surroundings(resolver, draft, declared, self.ignored, self.parts)


class Part:
    """A schema. It is known by its identity.

    Attributes:
        value: an object, or true or false.
        place: where it is in the document, for messages.
        around: its surroundings.
        layer: what `assertions` made of its properties, or None as long as it made nothing.
    """

    def __init__(self, value: Any, place: str, around: Surroundings) -> None:
        if not isinstance(value, bool | Mapping):
            raise ConstraintError(f"{short(place)}: a schema is an object, got {short(value)}")
        self.value, self.place = value, place
        self.around = around.inside(value, place) if isinstance(value, Mapping) else around
        self.layer: Any = None
        self._children: dict[tuple[str | int, ...], Part] = {}

    @classmethod
    def of(cls, value: Any, place: str, around: Surroundings) -> Part:
        """The part of a schema of the document: one, whatever leads to it."""
        if isinstance(value, bool):
            return cls(value, place, around)
        if id(value) not in around.parts:
            around.parts[id(value)] = cls(value, place, around)
        return around.parts[id(value)]

    def child(self, *steps: str | int) -> Part:
        """The part at the end of some steps."""
        if steps not in self._children:
            value: Any = self.value
            for step in steps:
                value = value[step]
            place = f"{self.place}.{_written(steps)}"
            self._children[steps] = Part.of(value, place, self.around)
        return self._children[steps]

    def constant(self, value: Any) -> Part:
        """A part that allows one value, in the same place: one for each value."""
        steps = ("const", identity(value))
        if steps not in self._children:
            # In the latest draft, because draft-04 has no constants.
            around = replace(self.around, draft=Draft.DRAFT_2020_12)
            self._children[steps] = Part({"const": value}, self.place, around)
        return self._children[steps]

    @cached_property
    def keywords(self) -> Mapping[str, Any]:
        """The keywords that restrict values, also those of other drafts than the part's own.

        Raises:
            ConstraintError: a keyword has a value that it cannot have.
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
        """The keywords that are of the part's own draft."""
        if all(has_keyword(self.around.draft, name) for name in self.keywords):
            return self.keywords
        draft = self.around.draft
        return {name: v for name, v in self.keywords.items() if has_keyword(draft, name)}

    @cached_property
    def types(self) -> frozenset[str] | None:
        """The types that it names, or None."""
        named = self.keywords.get("type")
        if named is None:
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
        """An error that names the part's place."""
        return ConstraintError(f"{short(self.place)}: {problem}")

    def _checked(self, name: str) -> Any:
        assert isinstance(self.value, Mapping)
        value, around = self.value[name], self.around
        problem = complaint(name, value)
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
    """A condition on a value: that a part holds, or that it does not."""

    part: Part
    negated: bool = False

    @property
    def opposite(self) -> Literal:
        """The condition that holds where this one does not."""
        return Literal(self.part, not self.negated)

    @property
    def certain(self) -> bool:
        """Whether every value meets it."""
        return self.part.value is False if self.negated else self.part.trivial

    @property
    def hopeless(self) -> bool:
        """Whether it is plain that no value meets it."""
        return self.part.trivial if self.negated else self.part.value is False


def _written(steps: tuple[str | int, ...]) -> str:
    """The steps of a message: ``anyOf[0]``, and the name of a property without ``properties``."""
    if len(steps) == 2:
        return f"{steps[0]}[{steps[1]}]" if isinstance(steps[1], int) else str(steps[1])
    return str(steps[0])


def unique(literals: Iterator[Literal] | tuple[Literal, ...]) -> tuple[Literal, ...]:
    """Literals without repetitions, and without those that every value meets."""
    return tuple(dict.fromkeys(literal for literal in literals if not literal.certain))


def place_of(literals: tuple[Literal, ...]) -> str:
    """Where conditions on a value are, for messages; the whole document where there are none."""
    return literals[0].part.place if literals else "$"
