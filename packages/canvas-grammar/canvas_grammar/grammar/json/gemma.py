"""Write Gemma's notation for the arguments of calls, such that vLLM reads it back correctly.

    {city:<|"|>Rome<|"|>,days:3,notes:[<|"|>a<|"|>]}

Names are bare, strings stand raw between two marks, and there are no escapes. vLLM's parser first
reads every value as text, and then gives it the type that the schema names at its place. It follows
only ``properties`` and ``items``, not a ``$ref`` or ``additionalProperties``. A text is
offered only if it is read back as a value that satisfies the schema. Not offered are:

* numbers, ``true``, ``false`` and ``null`` where `Reading` finds no such type;
* where it finds other types besides strings, strings that it might take for another type; those
  offered begin with a letter or one of ``_/#@$``, and not with a word such as ``null`` or ``nan``;
* strings that hold ``<|``, ``|>`` or a special token of the tokenizer;
* names with white space or one of ``:,{}[]()<>"|``;
* with ``uniqueItems``, more than one item.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from canvas_grammar.grammar.free_text import ANYTHING
from canvas_grammar.grammar.json.arrays import ArrayWriter
from canvas_grammar.grammar.json.facts import (
    ANY_STRING,
    Facts,
    fits_string,
)
from canvas_grammar.grammar.json.objects import ObjectWriter
from canvas_grammar.grammar.json.reader import SchemaLanguage, SchemaReader
from canvas_grammar.grammar.json.scalars import scalar_language
from canvas_grammar.grammar.json.subschemas import Literal
from canvas_grammar.grammar.json.values import JsonLayout, kind_of, whole_number
from canvas_grammar.grammar.json_facts import NumberFacts, StringFacts
from canvas_grammar.grammar.json_strings import RAW, string_content
from canvas_grammar.grammar.language import (
    EMPTY_TEXT,
    NOTHING,
    Node,
    chars,
    complement,
    either,
    literal,
    repeat,
    sequence,
    union,
)
from canvas_grammar.grammar.marks import DELIMITER, Marks
from canvas_grammar.grammar.regex import regex
from canvas_grammar.grammar.rules import REMEMBERED, Both, Without, shared
from canvas_grammar.limits import ConstraintError

JSON_KINDS = {bool: "boolean", int: "integer", float: "number", str: "string"}
EXACT = 1 << 53  # up to here, every integer is a double

CONTROLS = "".join(map(chr, range(0x21))) + "\x7f\x85\xa0"
OUTSIDE_NAMES = CONTROLS + ':,{}[]()<>"|'
# Strings that no reader takes for something else.
FIRST = "A-Za-z_/#@$"
WORDS = ("null", "true", "false", "nan", "inf")
INERT = re.compile(f"(?!(?i:{'|'.join(WORDS)}))[{FIRST}].*|", re.DOTALL)


def _inert() -> Node:
    singles = ((ord(c), ord(c)) for c in "_/#@$")
    first = chars([(0x41, 0x5A), (0x61, 0x7A), *singles])
    words = either(
        sequence(*(chars((ord(c), ord(c)) for c in (char, char.upper())) for char in word))
        for word in WORDS
    )
    begun = Without(sequence(first, ANYTHING), sequence(words, ANYTHING))
    return either([EMPTY_TEXT, begun])


INERT_TEXTS = _inert()


class Reading:
    """How vLLM's parser reads the texts at one place of the arguments.

    Attributes:
        types: the types that a text may get there; with only strings it stays unchanged.
        named: the names whose values it reads by a schema.
    """

    def __init__(self, schema: Any) -> None:
        schema = schema if isinstance(schema, dict) else {}
        properties = schema.get("properties")
        self.types = types_of(schema)
        self.named: dict[str, Any] = properties if isinstance(properties, dict) else {}
        self._items = schema.get("items")
        self._parts: dict[str | None, Reading] = {}

    def part(self, name: str | None) -> Reading:
        """How it reads the value of a property, or (None) the items of an array."""
        schema = self._items if name is None else self.named.get(name)
        if not isinstance(schema, dict):
            return AS_TEXT
        if name not in self._parts:
            self._parts[name] = Reading(schema)
        return self._parts[name]


def types_of(schema: Any) -> frozenset[str]:
    """The types that vLLM's parser finds in a schema (its ``extract_types_from_schema``)."""
    found: set[str] = set()
    if isinstance(schema, dict):
        named = schema.get("type", ())
        found.update([named] if isinstance(named, str) else named)
        for value in schema.get("enum") or ():
            found.add(JSON_KINDS.get(type(value)) or kind_of(value))
        for keyword in ("anyOf", "oneOf", "allOf"):
            for choice in schema.get(keyword) or ():
                found |= types_of(choice)
    return frozenset(found or {"string"})


AS_TEXT = Reading(None)


def gemma_arguments(schema: Any, marks: Marks) -> SchemaLanguage:
    """The arguments of a call that satisfy a schema, in Gemma's notation.

    Args:
        schema: of the arguments.
        marks: the vocabulary's tokens for parts of texts. No string holds a special one's text.

    Raises:
        ConstraintError: as for `json_schema`, or if no value that satisfies the schema would be
            read back.
    """
    layout = CallLayout(forbidden=forbidden_texts((r"<\|", r"\|>"), marks))
    return CallReader(schema, layout, marks.written(DELIMITER)).read()


def forbidden_texts(expressions: Iterable[str], marks: Marks) -> re.Pattern[str]:
    """Join expressions and the texts of special tokens; numbered tokens share one alternative."""
    special = (re.sub("[0-9]+", "[0-9]+", re.escape(text)) for text in marks.special)
    alike = (r"<\|" if text.startswith(r"<\|") else text for text in special)
    return re.compile("|".join(dict.fromkeys([*expressions, *alike])))


@lru_cache(REMEMBERED)
def texts_with(expression: str) -> Node:
    """All texts in which an expression finds something; the same node each time."""
    return sequence(ANYTHING, regex(expression), ANYTHING)


@dataclass(frozen=True)
class CallLayout(JsonLayout):
    """How the arguments themselves are written: their names stand bare.

    Attributes:
        outside: characters that no name holds.
        forbidden: what no name and no string holds.
        barred: names that no property has unless the schema names it.
    """

    gap: Node = EMPTY_TEXT
    outside: str = OUTSIDE_NAMES
    forbidden: re.Pattern[str] = re.compile(r"<\||\|>")
    barred: tuple[str, ...] = ()

    def name(self, text: str) -> Node:
        """A name, if it holds nothing that is forbidden."""
        held = not text or set(text) & set(self.outside) or re.search(r"\s", text)
        return NOTHING if held or self.forbidden.search(text) else literal(text)

    @property
    def names(self) -> Node:
        """All names."""
        return bare_names(self.outside, self.forbidden.pattern, self.barred)

    @property
    def held(self) -> Node:
        """The texts that hold what is forbidden."""
        return texts_with(self.forbidden.pattern)


@lru_cache(REMEMBERED)
def bare_names(outside: str, forbidden: str, barred: tuple[str, ...]) -> Node:
    """The names of a `CallLayout`; the same node each time."""
    allowed = complement(union((ord(c), ord(c)) for c in outside))
    # Unicode's other white space lies from U+1680 on.
    character = chars((first, min(last, 0x167F)) for first, last in allowed)
    names = Without(repeat(character, 1, None), texts_with(forbidden))
    return Without(names, either(map(literal, barred))) if barred else names


@lru_cache(REMEMBERED)
def raw_strings(facts: StringFacts, forbidden: str, alone: bool) -> Node:
    """Strings without quotes; the same node each time.

    Args:
        facts: conditions that they meet.
        forbidden: an expression that finds nothing in them.
        alone: whether nothing but strings is read at their place.
    """
    if facts == ANY_STRING:
        text = Without(ANYTHING, texts_with(forbidden))
        return text if alone else Both(text, INERT_TEXTS)
    content = string_content(facts, RAW)
    return content if content.empty else Both(content, raw_strings(ANY_STRING, forbidden, alone))


class CallReader(SchemaReader[Reading]):
    """Values of arguments that vLLM's parser reads as texts."""

    no_value = "the schema allows no value that vLLM would read back from Gemma's notation"

    def __init__(self, schema: Any, layout: CallLayout, quote: Node) -> None:
        super().__init__(schema, Reading(schema))
        self.layout, self.quote = layout, quote

    def layout_of(self, context: Reading) -> JsonLayout:
        """How brackets and names are written."""
        return self.layout

    def part(self, context: Reading, name: str | None) -> Reading:
        """How the value of a property is read, or (None) the items of an array."""
        return context.part(name)

    def unnamed(self, context: Reading) -> Reading:
        """How the values of properties are read that no schema names."""
        return AS_TEXT

    def clean(self, texts: Node) -> Node:
        """Those of some texts that hold nothing that is forbidden."""
        return texts if texts.empty else Without(texts, self.layout.held)

    def scalar(self, facts: Facts, context: Reading) -> Node:
        """See the module's docstring; arguments are an object."""
        if context is self.context:
            return NOTHING
        if facts.kind == "string":
            return self._string(facts, context.types <= {"string"})
        if facts.kind == "number":
            return number_of_types(facts, context.types)
        return scalar_language(facts) if facts.kind in context.types else NOTHING

    def compound(self, facts: Facts, context: Reading) -> Node:
        """As JSON's."""
        if facts.kind == "object":
            return _Objects(self, context).language(facts)
        if context is self.context:
            return NOTHING
        if facts.distinct:
            if facts.least > 1:
                raise ConstraintError("uniqueItems is supported for at most one item of a call")
            facts = facts.copy()
            facts.count(most=1)
        items = ArrayWriter(
            self.expansion,
            self.layout_of(context),
            lambda literals: self.value(literals, self.part(context, None)),
        )
        return items.language(facts)

    def constant(self, value: Any, context: Reading) -> Node:
        """A single value."""
        layout = self.layout_of(context)
        if isinstance(value, list):
            parts = [layout.item(self.constant(v, self.part(context, None))) for v in value]
            return layout.bracketed("[]", sequence(*parts), not value)
        if isinstance(value, dict):
            parts = [
                layout.pair(layout.name(name), self.constant(v, self.part(context, name)))
                for name, v in value.items()
            ]
            return layout.bracketed("{}", sequence(*parts), not value)
        facts = Facts(kind_of(value))
        facts.only([value])
        return self.scalar(facts, context)

    def _string(self, facts: Facts, alone: bool) -> Node:
        """The strings that meet conditions; `alone` if only strings are read at this place."""
        content = self._content(facts, alone)
        return shared("string", sequence(self.quote, content, self.quote))

    def _content(self, facts: Facts, alone: bool) -> Node:
        if facts.values is None:
            found = raw_strings(facts.string, self.layout.forbidden.pattern, alone)
            barred = either(map(literal, facts.barred.values()))
            return found if barred.empty or found.empty else Without(found, barred)
        options = []
        for value in facts.values.values():
            verdict = fits_string(facts.string, value)
            held = self.layout.forbidden.search(value)
            if verdict is not False and not held and (alone or INERT.fullmatch(value)):
                text = literal(value)
                options.append(text if verdict else Both(text, string_content(facts.string, RAW)))
        return either(options)


class _Objects(ObjectWriter):
    """Objects whose values are read as vLLM's parser does at this place."""

    def __init__(self, reader: CallReader, reading: Reading) -> None:
        layout = reader.layout_of(reading)
        other = reader.unnamed(reading)
        super().__init__(reader.expansion, layout, lambda literals: reader.value(literals, other))
        self.reader, self.reading = reader, reading

    def named_value(self, name: str, literals: tuple[Literal, ...]) -> Node:
        return self.reader.value(literals, self.reader.part(self.reading, name))

    def unnamed(self, spelled: StringFacts, naming: Facts, known: list[str]) -> Node:
        known = [*known, *self.reading.named]
        if not isinstance(self.layout, CallLayout):
            return self.reader.clean(super().unnamed(spelled, naming, known))
        if naming.values is not None:
            others = (v for v in naming.values.values() if v not in known)
            return either(map(self.layout.name, others))
        content = string_content(spelled, RAW)
        if content.empty:
            return NOTHING
        barred = either(map(literal, [*known, *naming.barred.values()]))
        return Without(Both(content, self.layout.names), barred)


def number_of_types(facts: Facts, types: frozenset[str]) -> Node:
    """The numbers that meet conditions where vLLM's parser finds these types."""
    if not types & {"integer", "number"}:
        return NOTHING
    facts = facts.copy()
    if "number" not in types:
        facts.measured(NumberFacts(integer=True))
    if facts.values is not None:
        # Without the type of integers, a number is read as a double.
        facts.values = {
            name: value
            for name, value in facts.values.items()
            if "integer" in types or abs(whole_number(value) or 0) <= EXACT
        }
    return scalar_language(facts)
