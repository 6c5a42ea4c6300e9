"""Compare JSON values, and write them and what stands between them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from canvas_grammar.grammar.language import (
    EMPTY_TEXT,
    Node,
    Ranges,
    chars,
    complement,
    either,
    intersection,
    literal,
    optional,
    sequence,
    union,
)
from canvas_grammar.grammar.rules import WithoutFirst
from canvas_grammar.limits import ConstraintError

# ---- How characters are written in JSON.
#
# Each character has one spelling: it is escaped only where it must be, and in the shortest way.

SHORT_ESCAPES = {'"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
ESCAPED: Ranges = union([(0x0, 0x1F), *((ord(c), ord(c)) for c in SHORT_ESCAPES)])
PLAIN = chars(complement(ESCAPED))
SHORT_ESCAPE = sequence(literal("\\"), chars((ord(c), ord(c)) for c in SHORT_ESCAPES.values()))


def inside_string(ranges: Ranges) -> Node:
    """One character of `ranges` as it is written in a JSON string."""
    plain = chars(intersection(ranges, complement(ESCAPED)))
    escapes = []
    for first, last in intersection(ranges, ESCAPED):
        for code in range(first, last + 1):
            short = SHORT_ESCAPES.get(chr(code))
            escapes.append(literal(f"\\{short}" if short else f"\\u{code:04x}"))
    return either([plain, *escapes])


def _any_character(null: str) -> Node:
    """Any character as `inside_string` writes it; `null` is the last digit of the first escape."""
    # The other controls: those below U+0010, and those from there on.
    low = sequence(literal("0"), chars([(ord(null), 0x37), (0x62, 0x62), (0x65, 0x66)]))
    high = sequence(literal("1"), chars([(0x30, 0x39), (0x61, 0x66)]))
    return either([PLAIN, SHORT_ESCAPE, sequence(literal("\\u00"), either([low, high]))])


ANY_CHARACTER = _any_character(null="0")
# For sets of characters: since `ANY` lacks U+0000, nothing says whether a set contains it.
ANY_BUT_NULL = _any_character(null="1")
# In strings of counted lengths. Without the escapes of controls, which no reader of a bounded
# string needs, tokens can cut a character in half as many ways.
ANY_BUT_CONTROLS = either([PLAIN, SHORT_ESCAPE])
QUOTE = literal('"')


# ---- Constants: which of them are equal, which type they have, and how one is written.

# Constructs that Python's dialect has and ECMA-262's lacks or gives another meaning.
FOREIGN = re.compile(r"\\[AZGbB0-9]|\(\?(?![:])")


KIND_OF = {type(None): "null", bool: "boolean", str: "string", list: "array", dict: "object"}


def whole_number(value: Any) -> int | None:
    """The integer that a JSON number is (1.0 is 1), or None."""
    is_float = isinstance(value, float) and value.is_integer()
    return int(value) if is_float or type(value) is int else None


def kind_of(value: Any) -> str:
    """The type of a JSON value; integers have the type of numbers."""
    return KIND_OF.get(type(value), "number")


def identity(value: Any) -> str:
    """The same text for values that JSON Schema considers equal, such as 1 and 1.0, not true."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, list):
        return f"[{','.join(identity(part) for part in value)}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{json.dumps(k)}:{identity(value[k])}' for k in sorted(value))}}}"
    return json.dumps(value)


def json_text(value: Any) -> str:
    """A value as `json.dumps` writes it with ``ensure_ascii=False``, if it is JSON."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        if any(0xD800 <= ord(char) <= 0xDFFF for char in text):
            text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConstraintError(f"a value of the schema is not JSON: {error}") from error
    return text


def spellings(text: str) -> Node:
    """A JSON string in all the spellings that any language of strings here may have."""
    return sequence(literal('"'), *(_spelled(char) for char in text), literal('"'))


@lru_cache(maxsize=1024)
def _spelled(char: str) -> Node:
    code = ord(char)
    if 0xD800 <= code <= 0xDFFF:
        return literal(f"\\u{code:04x}")
    if not any(first <= code <= last for first, last in ESCAPED):
        return literal(char)
    digits = (chars((ord(c), ord(c)) for c in {d, d.upper()}) for d in f"{code:04x}")
    options = [sequence(literal("\\u"), *digits)]
    if char in SHORT_ESCAPES:
        options.append(literal(f"\\{SHORT_ESCAPES[char]}"))
    return either(options)


@lru_cache(maxsize=65536)
def found(pattern: str, text: str) -> bool | None:
    """Whether a pattern is found in a text; None if dialects of expressions may not agree."""
    expression = _compiled(pattern)
    if expression is None or not (text.isascii() and (text.isprintable())):
        return None
    return expression.search(text) is not None


@lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str] | None:
    if FOREIGN.search(pattern):
        return None
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError):
        return None


# ---- The white space of JSON, and how its brackets, names and messages are written.


@dataclass(frozen=True)
class JsonLayout:
    """White space of JSON: after opening brackets, colons and commas, and before closing ones."""

    gap: Node = field(default_factory=lambda: optional(literal(" ")))

    def item(self, value: Node) -> Node:
        """A comma, white space and a value."""
        return sequence(literal(","), self.gap, value)

    def pair(self, name: Node, value: Node) -> Node:
        """A comma, white space, a name, a colon and a value."""
        return sequence(literal(","), self.gap, name, literal(":"), self.gap, value)

    def name(self, text: str) -> Node:
        """A name that a condition names; `NOTHING` if it cannot be written."""
        return literal(json_text(text))

    def bracketed(self, brackets: str, inside: Node, empty: bool) -> Node:
        """An opening and a closing bracket around items, each of which begins with a comma.

        The first comma is taken away. Only with `empty`, there may be no item.
        """
        options = [literal(brackets)] if empty else []
        if not inside.empty and inside is not EMPTY_TEXT:
            begin, end = map(literal, brackets)
            options.append(sequence(begin, WithoutFirst(",", inside), self.gap, end))
        return either(options)


def names_a_place(text: str) -> bool:
    """Whether a message, or the name of a rule, begins with a place in a schema."""
    return text.startswith(("$", "#", "http"))


def short(value: Any) -> str:
    """A value for messages, shortened because hostile schemas have long names."""
    text = value if isinstance(value, str) else repr(value)[:200]
    return text if len(text) <= 80 else f"{text[:77]}..."
