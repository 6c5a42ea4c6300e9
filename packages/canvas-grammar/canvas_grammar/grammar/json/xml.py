"""Write the arguments of calls between tags, such that vLLM's parsers read them back correctly.

    <parameter=city>Rome</parameter><parameter=stay>{"days": 3}</parameter>

Every argument has its own tags. A string stands between them as it is, and any other value as
JSON. vLLM's parsers first read an argument as text, and then give it the type that the schema names
in ``properties``. So what `gemma` leaves out of arguments is left out here, too, and arrays and
objects are offered only where a type says that one may be there. No string and no name, also inside
of JSON, holds what a parser might take for the end of an argument or of a call.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from canvas_grammar.grammar.json.facts import Facts
from canvas_grammar.grammar.json.gemma import (
    AS_TEXT,
    CONTROLS,
    INERT_TEXTS,
    CallLayout,
    CallReader,
    Reading,
    forbidden_texts,
    texts_with,
)
from canvas_grammar.grammar.json.reader import SchemaLanguage
from canvas_grammar.grammar.json.scalars import scalar_language, strings
from canvas_grammar.grammar.json.values import QUOTE, JsonLayout, json_text, kind_of
from canvas_grammar.grammar.json_facts import StringFacts
from canvas_grammar.grammar.language import (
    EMPTY_TEXT,
    NOTHING,
    Chain,
    Node,
    Repeat,
    either,
    literal,
    optional,
    repeat,
    sequence,
)
from canvas_grammar.grammar.marks import Marks
from canvas_grammar.grammar.rules import REMEMBERED, Both, Without, shared


@dataclass(frozen=True)
class Style:
    """How an argument is written.

    Attributes:
        begin: the text before a name.
        named: the text between a name and a value that is no string.
        named_string: the same for strings.
        end: the text after a value.
        forbidden: expressions for what no string and no name holds.
        typed: values inside of JSON are given types, too.
    """

    begin: str
    named: str
    named_string: str
    end: str
    forbidden: tuple[str, ...]
    typed: bool = False


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
    """The arguments of a call that satisfy a schema, in a style with tags.

    Args:
        schema: of the arguments.
        style: how they are written.
        marks: the vocabulary's tokens for parts of texts. No string holds a special one's text.
        wrapped: there are line ends around a value, which the parser takes away.

    Raises:
        ConstraintError: as for `gemma_arguments`.
    """
    return _XmlReader(schema, style, marks, NEWLINE if wrapped else EMPTY_TEXT).read()


@dataclass(frozen=True)
class _Tags(CallLayout):
    begin: Node = EMPTY_TEXT
    end: Node = EMPTY_TEXT

    def pair(self, name: Node, value: Node) -> Node:
        """An argument; the value includes the text before it."""
        return sequence(self.begin, name, value, self.end, optional(NEWLINE))

    def bracketed(self, brackets: str, inside: Node, empty: bool) -> Node:
        """All arguments."""
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
def quoted_strings(facts: StringFacts, forbidden: str, alone: bool) -> Node:
    """Strings of JSON; the same node each time, see `raw_strings`."""
    text = strings(facts)
    if not text.empty:
        text = Without(text, texts_with(forbidden))
        text = shared("string", text if alone else Both(text, INERT_STRING))
    return text


class _XmlReader(CallReader):
    no_value = "the schema allows no value that vLLM would read back from a call"

    def __init__(self, schema: Any, style: Style, marks: Marks, wrap: Node) -> None:
        forbidden = forbidden_texts(style.forbidden, marks)
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
                return quoted_strings(facts.string, self.layout.forbidden.pattern, alone)
            text = self.clean(scalar_language(facts))
            return text if text.empty or alone else Both(text, INERT_STRING)
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
