"""Schemas of objects and arrays, and the white space that they are laid out with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_dllm.constraints.grammar.json_values import (
    ANY_CHARACTER,
    QUOTE,
    json_literal,
    whole_number,
)
from vllm_dllm.constraints.grammar.language import (
    EMPTY_TEXT,
    NOTHING,
    Node,
    either,
    literal,
    optional,
    repeat,
    sequence,
)
from vllm_dllm.constraints.limits import ConstraintError

WHY_NOT_ANY = (
    "any JSON is allowed here, which no automaton can follow (it nests without end); say which "
    "type, and for objects and arrays what is in them"
)
# A function from a schema, and the step that leads to it, to the language of its values.
ReadInside = Callable[[Any, str], Node]


@dataclass(frozen=True)
class JsonLayout:
    """The white space of JSON, and the objects and arrays that are written with it.

    Attributes:
        gap: white space after an opening bracket, a colon and a comma, and before a closing
            bracket.
    """

    gap: Node = field(default_factory=lambda: optional(literal(" ")))

    @property
    def comma(self) -> Node:
        """The text between two items: a comma and white space."""
        return sequence(literal(","), self.gap)

    def array(self, schema: Mapping[str, Any], path: str, inside: ReadInside) -> Node:
        """The language of an array; `path` is the place of its schema, for messages.

        Raises:
            ConstraintError: uniqueItems, or an invalid value of a keyword.
        """
        least, most = _counts("Items", schema, path)
        if schema.get("uniqueItems") not in (None, False):
            raise ConstraintError(
                f"{path}: uniqueItems is not supported: an automaton cannot remember what was there"
            )
        prefix = schema.get("prefixItems", [])
        items = schema.get("items", not prefix)
        if isinstance(items, list) or not isinstance(prefix, list):
            raise ConstraintError(f"{path}: items is one schema, prefixItems is a list")
        if most is not None and most < least:
            return NOTHING
        if most == 0:
            return self._bracketed("[", EMPTY_TEXT, "]")
        first = [inside(part, f"prefixItems[{n}]") for n, part in enumerate(prefix[:most])]
        rest: Node = NOTHING
        if items is not False and (most is None or most > len(first)):
            rest = inside(items, "items")
        rest_limit = None if most is None else most - len(first)
        if not first:
            limit = rest_limit and rest_limit - 1
            filled = sequence(rest, repeat(sequence(self.comma, rest), max(least - 1, 0), limit))
            return self._bracketed("[", filled if least else optional(filled), "]")
        parts = [first[0], *(sequence(self.comma, part) for part in first[1:])]
        others = repeat(sequence(self.comma, rest), max(least - len(first), 0), rest_limit)
        return self._bracketed("[", sequence(*parts, others), "]")

    def object(self, schema: Mapping[str, Any], path: str, inside: ReadInside) -> Node:
        """The language of an object with named properties, or of any names and one value schema.

        Raises:
            ConstraintError: it is neither of the two, a required name has no schema, its number of
                properties is limited in a way that is not supported, or a keyword has an invalid
                value.
        """
        properties, required = schema.get("properties"), schema.get("required", [])
        if properties is not None and not isinstance(properties, Mapping):
            raise ConstraintError(f"{path}: properties is an object")
        if not isinstance(required, list) or not all(isinstance(n, str) for n in required):
            raise ConstraintError(f"{path}: required is a list of names")
        least, most = _counts("Properties", schema, path)
        unnamed = [name for name in required if name not in (properties or {})]
        if unnamed:
            raise ConstraintError(
                f"{path}: required names {short(unnamed[0])}, which properties does not"
            )
        additional = schema.get("additionalProperties")
        if properties:
            if least > len(set(required)) or (most is not None and most < len(properties)):
                raise ConstraintError(
                    f"{path}: minProperties or maxProperties beside optional properties is "
                    "not supported"
                )
            return self._bracketed("{", self._properties(schema, inside), "}")
        if isinstance(additional, Mapping) or additional is True:
            if least > 1:
                raise ConstraintError(
                    f"{path}: minProperties above 1 is not supported: names may repeat"
                )
            return self._map(additional, (least, most), inside)
        if properties is None and additional is not False:
            raise ConstraintError(f"{path}: {WHY_NOT_ANY}")
        return NOTHING if least else self._bracketed("{", EMPTY_TEXT, "}")

    def _map(self, schema: Any, counts: tuple[int, int | None], inside: ReadInside) -> Node:
        """An object with any names, whose values all have one schema."""
        value = inside(schema, "additionalProperties")
        name = sequence(QUOTE, repeat(ANY_CHARACTER, 0, None), QUOTE, literal(":"), self.gap)
        least, most = counts
        pair = sequence(name, value)
        if most == 0:
            return self._bracketed("{", EMPTY_TEXT, "}")
        filled = sequence(
            pair, repeat(sequence(self.comma, pair), 0, None if most is None else most - 1)
        )
        return self._bracketed("{", filled if least else optional(filled), "}")

    def _properties(self, schema: Mapping[str, Any], inside: ReadInside) -> Node:
        """Named properties in the order of the schema; optional ones may be left out."""
        pairs = []
        for name, subschema in schema["properties"].items():
            value = inside(subschema, name)
            pair = sequence(json_literal(name), literal(":"), self.gap, value)
            pairs.append((pair, name in schema.get("required", [])))
        # From the last property to the first: the rest of the object after another property, and
        # the rest of the object if no property precedes it.
        after_another: Node = EMPTY_TEXT
        first_ones: Node = EMPTY_TEXT
        for pair, needed in reversed(pairs):
            without = NOTHING if needed else first_ones
            first_ones = either([sequence(pair, after_another), without])
            preceded = sequence(self.comma, pair)
            after_another = sequence(preceded if needed else optional(preceded), after_another)
        return first_ones

    def _bracketed(self, opening: str, inside: Node, closing: str) -> Node:
        if inside is EMPTY_TEXT:
            return literal(opening + closing)
        return sequence(literal(opening), self.gap, inside, self.gap, literal(closing))


def _counts(parts: str, schema: Mapping[str, Any], path: str) -> tuple[int, int | None]:
    least, most = (schema.get(f"{end}{parts}") for end in ("min", "max"))
    for count in (least, most):
        if count is not None and (whole_number(count) is None or count < 0):
            raise ConstraintError(f"{path}: {short(count)} is no count of {parts.lower()}")
    return whole_number(least) or 0, whole_number(most)


def short(value: Any) -> str:
    """A value for messages, shortened because hostile schemas have long names."""
    text = value if isinstance(value, str) else repr(value)[:200]
    return text if len(text) <= 80 else f"{text[:77]}..."
