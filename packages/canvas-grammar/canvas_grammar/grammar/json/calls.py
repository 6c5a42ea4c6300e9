"""Write the arguments of calls, such that vLLM's parsers read them back correctly.

In Gemma's notation names are bare, strings stand raw between two marks, and nothing is escaped:

    {city:<|"|>Rome<|"|>,days:3,notes:[<|"|>a<|"|>]}

In the other styles every argument has its own tags. A string stands between them as it is, and any
other value as JSON:

    <parameter=city>Rome</parameter><parameter=stay>{"days": 3}</parameter>

vLLM's parsers first read a value as text, and then give it the type that the schema names at its
place. They follow only ``properties`` and, in Gemma's notation, ``items``, not a ``$ref`` or
``additionalProperties``. A text is offered only if it is read back as a value that satisfies the
schema. Not offered are:

* numbers, ``true``, ``false`` and ``null`` where `Reading` finds no such type, and between tags
  arrays and objects where it finds no such type;
* where it finds other types besides strings, strings that it might take for another type; those
  offered begin with a letter or one of ``_/#@$``, and not with a word such as ``null`` or ``nan``;
* strings that hold a special token of the tokenizer, or what a parser might take for the end of a
  string, an argument or a call (``<|``, ``|>``, ``</parameter``); nor such names;
* names with white space or one of ``:,{}[]()<>"|``, between tags one of ``<>"``;
* with ``uniqueItems``, more than one item.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from canvas_grammar.grammar.free_text import ANYTHING
from canvas_grammar.grammar.json.containers import ArrayWriter, ObjectWriter
from canvas_grammar.grammar.json.facts import ANY_STRING, Facts, fits_string
from canvas_grammar.grammar.json.reader import SchemaLanguage, SchemaReader
from canvas_grammar.grammar.json.scalars import scalar_language
from canvas_grammar.grammar.json.subschemas import Literal
from canvas_grammar.grammar.json.values import QUOTE, JsonLayout, json_text, kind_of, whole_number
from canvas_grammar.grammar.json_numbers import LARGEST_EXACT, NumberFacts
from canvas_grammar.grammar.json_strings import RAW, StringFacts, string_content, string_language
from canvas_grammar.grammar.language import (
    EMPTY_TEXT,
    NOTHING,
    Chain,
    Node,
    Repeat,
    chars,
    complement,
    either,
    literal,
    optional,
    repeat,
    sequence,
    union,
)
from canvas_grammar.grammar.marks import DELIMITER, Marks
from canvas_grammar.grammar.regex import regex
from canvas_grammar.grammar.rules import REMEMBERED, Both, Without, both, shared, without
from canvas_grammar.limits import ConstraintError

JSON_KINDS = {bool: "boolean", int: "integer", float: "number", str: "string"}
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

    A text may get one of `types` there, and it stays unchanged if these are only strings. Values of
    the names in `named` are read by a schema.
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

    Raises:
        ConstraintError: as for `read_schema`, or if no value that satisfies the schema would be
            read back.
    """
    layout = _CallLayout(forbidden=_forbidden_texts((r"<\|", r"\|>"), marks))
    return _CallReader(schema, layout, marks.written(DELIMITER)).read()


def _forbidden_texts(expressions: Iterable[str], marks: Marks) -> re.Pattern[str]:
    """Join expressions and the texts of special tokens; numbered tokens share one alternative."""
    special = (re.sub("[0-9]+", "[0-9]+", re.escape(text)) for text in marks.special)
    alike = (r"<\|" if text.startswith(r"<\|") else text for text in special)
    return re.compile("|".join(dict.fromkeys([*expressions, *alike])))


@lru_cache(REMEMBERED)
def _texts_with(expression: str) -> Node:
    """All texts in which an expression finds something; the same node each time."""
    return sequence(ANYTHING, regex(expression), ANYTHING)


@dataclass(frozen=True)
class _CallLayout(JsonLayout):
    """How the arguments themselves are written: their names stand bare."""

    gap: Node = EMPTY_TEXT
    outside: str = OUTSIDE_NAMES  # characters that no name holds
    forbidden: re.Pattern[str] = re.compile(r"<\||\|>")  # what no name and no string holds
    barred: tuple[str, ...] = ()  # names that no property has unless the schema names it

    def name(self, text: str) -> Node:
        held = not text or set(text) & set(self.outside) or re.search(r"\s", text)
        return NOTHING if held or self.forbidden.search(text) else literal(text)


@lru_cache(REMEMBERED)
def _bare_names(outside: str, forbidden: str, barred: tuple[str, ...]) -> Node:
    """The names of a `_CallLayout`; the same node each time."""
    allowed = complement(union((ord(c), ord(c)) for c in outside))
    # Unicode's other white space lies from U+1680 on.
    character = chars((first, min(last, 0x167F)) for first, last in allowed)
    names = Without(repeat(character, 1, None), _texts_with(forbidden))
    return Without(names, either(map(literal, barred))) if barred else names


@lru_cache(REMEMBERED)
def _raw_strings(facts: StringFacts, forbidden: str, alone: bool) -> Node:
    """Strings without quotes; the same node each time.

    The expression `forbidden` finds nothing in them. If they are `alone`, nothing but strings is
    read at their place.
    """
    if facts == ANY_STRING:
        text = Without(ANYTHING, _texts_with(forbidden))
        return text if alone else Both(text, INERT_TEXTS)
    return both(string_content(facts, RAW), _raw_strings(ANY_STRING, forbidden, alone))


class _CallReader(SchemaReader[Reading]):
    """Values of arguments that vLLM's parser reads as texts."""

    no_value = "the schema allows no value that vLLM would read back from Gemma's notation"

    def __init__(self, schema: Any, layout: _CallLayout, quote: Node) -> None:
        super().__init__(schema, Reading(schema))
        self.layout, self.quote = layout, quote

    def layout_of(self, context: Reading) -> JsonLayout:
        return self.layout

    def part(self, context: Reading, name: str | None) -> Reading:
        return context.part(name)

    def unnamed(self, context: Reading) -> Reading:
        """How the values of properties are read that no schema names."""
        return AS_TEXT

    def clean(self, texts: Node) -> Node:
        """Those of some texts that hold nothing that is forbidden."""
        return without(texts, _texts_with(self.layout.forbidden.pattern))

    def scalar(self, facts: Facts, context: Reading) -> Node:
        if context is self.context:  # arguments are an object
            return NOTHING
        if facts.kind == "string":
            return self._string(facts, context.types <= {"string"})
        if facts.kind == "number":
            return _number_of_types(facts, context.types)
        return scalar_language(facts) if facts.kind in context.types else NOTHING

    def compound(self, facts: Facts, context: Reading) -> Node:
        if facts.kind == "object":
            return _Objects(self, context).language(facts)
        if context is self.context:
            return NOTHING
        if facts.distinct:
            if facts.least > 1:
                raise ConstraintError("uniqueItems is supported for at most one item of a call")
            facts = facts.copy()
            facts.count(most=1)
        item = partial(self.value, context=self.part(context, None))
        return ArrayWriter(self.expansion, self.layout_of(context), item).language(facts)

    def constant(self, value: Any, context: Reading) -> Node:
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
        return shared("string", sequence(self.quote, self._content(facts, alone), self.quote))

    def _content(self, facts: Facts, alone: bool) -> Node:
        if facts.values is None:
            found = _raw_strings(facts.string, self.layout.forbidden.pattern, alone)
            return without(found, either(map(literal, facts.barred.values())))
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

    def __init__(self, reader: _CallReader, reading: Reading) -> None:
        value = partial(reader.value, context=reader.unnamed(reading))
        super().__init__(reader.expansion, reader.layout_of(reading), value)
        self.reader, self.reading = reader, reading

    def named_value(self, name: str, literals: tuple[Literal, ...]) -> Node:
        return self.reader.value(literals, self.reader.part(self.reading, name))

    def unnamed(self, spelled: StringFacts, naming: Facts, known: list[str]) -> Node:
        known, layout = [*known, *self.reading.named], self.layout
        if not isinstance(layout, _CallLayout):
            return self.reader.clean(super().unnamed(spelled, naming, known))
        if naming.values is not None:
            others = (v for v in naming.values.values() if v not in known)
            return either(map(layout.name, others))
        names = _bare_names(layout.outside, layout.forbidden.pattern, layout.barred)
        barred = either(map(literal, [*known, *naming.barred.values()]))
        return without(both(string_content(spelled, RAW), names), barred)


def _number_of_types(facts: Facts, types: frozenset[str]) -> Node:
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
            if "integer" in types or abs(whole_number(value) or 0) <= LARGEST_EXACT
        }
    return scalar_language(facts)


# ---- Arguments between tags.


@dataclass(frozen=True)
class Style:
    """How an argument is written."""

    begin: str  # before a name
    named: str  # between a name and a value that is no string
    named_string: str  # the same for strings
    end: str  # after a value
    forbidden: tuple[str, ...]  # expressions for what no string and no name holds
    typed: bool = False  # values inside of JSON are given types, too


PARAMETER = r"<[\s/]*parameter"
GLM_VALUE = "</arg_key><arg_value>"
DSML = "\uff5cDSML\uff5c"


def _dsml(parameter: str) -> Style:
    begin, end = f'<{DSML}{parameter} name="', f"</{DSML}{parameter}>"
    return Style(begin, '" string="false">', '" string="true">', end, (DSML,), typed=True)


# xgrammar's names of styles.
STYLES = {
    "qwen_xml": Style("<parameter=", ">", ">", "</parameter>", (PARAMETER, "</function>")),
    "minimax_xml": Style('<parameter name="', '">', '">', "</parameter>", (PARAMETER, "</invoke>")),
    "deepseek_xml": _dsml("parameter"),
    "deepseek_v4_1_xml": _dsml(" parameter"),
    "glm_xml": Style(
        "<arg_key>", GLM_VALUE, GLM_VALUE, "</arg_value>", ("</?arg_", "</tool_call>")
    ),
}
# A parser of typed values takes a single argument with such a name for all arguments.
WRAPPERS = ("arguments", "input")
NEWLINE = literal("\n")
INERT_STRING = sequence(QUOTE, INERT_TEXTS, QUOTE)
# The context of values inside JSON that vLLM reads as JSON.
EXACT = Reading(None)


def xml_arguments(schema: Any, style: Style, marks: Marks, wrapped: bool) -> SchemaLanguage:
    """The same as `gemma_arguments` in a style with tags.

    If they are `wrapped`, there are line ends around a value, which the parser takes away.
    """
    return _XmlReader(schema, style, marks, NEWLINE if wrapped else EMPTY_TEXT).read()


@dataclass(frozen=True)
class _Tags(_CallLayout):
    begin: Node = EMPTY_TEXT
    end: Node = EMPTY_TEXT

    def pair(self, name: Node, value: Node) -> Node:
        # The value includes the text before it.
        return sequence(self.begin, name, value, self.end, optional(NEWLINE))

    def bracketed(self, brackets: str, inside: Node, empty: bool) -> Node:
        if inside.empty:
            return EMPTY_TEXT if empty else NOTHING
        if empty:
            return inside
        return _not_empty(inside.parts if isinstance(inside, Chain) else (inside,))


def _not_empty(parts: Sequence[Node]) -> Node:
    """The texts of a chain, except the empty one if all of its parts are optional."""
    options = []
    for n, part in enumerate(parts):
        if not isinstance(part, Repeat) or part.least > 0:
            options.append(sequence(*parts[n:]))
            break
        options.append(sequence(repeat(part.part, 1, part.most), *parts[n + 1 :]))
    return either(options)


@dataclass(frozen=True)
class _Inside(JsonLayout):
    forbidden: re.Pattern[str] = re.compile("")

    def name(self, text: str) -> Node:
        return NOTHING if self.forbidden.search(text) else super().name(text)


@lru_cache(REMEMBERED)
def _quoted_strings(facts: StringFacts, forbidden: str, alone: bool) -> Node:
    """Strings of JSON; the same node each time, see `_raw_strings`."""
    text = without(string_language(facts), _texts_with(forbidden))
    return shared("string", text if alone else both(text, INERT_STRING))


class _XmlReader(_CallReader):
    no_value = "the schema allows no value that vLLM would read back from a call"

    def __init__(self, schema: Any, style: Style, marks: Marks, wrap: Node) -> None:
        forbidden = _forbidden_texts(style.forbidden, marks)
        layout = _Tags(
            outside=CONTROLS + '<>"', forbidden=forbidden, barred=WRAPPERS if style.typed else (),
            begin=marks.written(style.begin), end=sequence(wrap, marks.written(style.end)),
        )  # fmt: skip
        super().__init__(schema, layout, EMPTY_TEXT)
        self.inside = _Inside(forbidden=forbidden)
        self.typed = style.typed
        self.named = {
            True: sequence(marks.written(style.named_string), wrap),
            False: sequence(marks.written(style.named), wrap),
        }
        # How arguments are read; everything else is inside of JSON.
        self.outer = {AS_TEXT, *map(self.context.part, self.context.named)}

    def layout_of(self, context: Reading) -> JsonLayout:
        return self.layout if context is self.context else self.inside

    def part(self, context: Reading, name: str | None) -> Reading:
        found = context.part(name)
        if context is self.context:
            return found
        return found if self.typed and found is not AS_TEXT else EXACT

    def unnamed(self, context: Reading) -> Reading:
        return AS_TEXT if context is self.context else EXACT

    def scalar(self, facts: Facts, context: Reading) -> Node:
        if context is self.context or context in self.outer:
            return self._argument(super().scalar(facts, context), facts.kind, context)
        if facts.kind == "string":
            alone = context is EXACT or context.types <= {"string"}
            if facts.values is None and not facts.barred:
                return _quoted_strings(facts.string, self.layout.forbidden.pattern, alone)
            text = self.clean(scalar_language(facts))
            return text if alone else both(text, INERT_STRING)
        if context is EXACT:
            return scalar_language(facts)
        return super().scalar(facts, context)

    def compound(self, facts: Facts, context: Reading) -> Node:
        return self._argument(super().compound(facts, context), facts.kind, context)

    def constant(self, value: Any, context: Reading) -> Node:
        if context is EXACT:
            text = json_text(value)
            return NOTHING if self.layout.forbidden.search(text) else literal(text)
        found, kind = super().constant(value, context), kind_of(value)
        return self._argument(found, kind, context) if kind in ("array", "object") else found

    def _argument(self, value: Node, kind: str, context: Reading) -> Node:
        """The value itself; if it is an argument, with the text before it."""
        if context not in self.outer:
            return value
        if kind in ("array", "object") and kind not in context.types:
            return NOTHING
        return sequence(self.named[kind == "string"], value)
