"""How characters are written in JSON.

Only a part of what JSON allows is offered, so that each character has one spelling: it is escaped
only where it must be, and then in the shortest way.
"""

from __future__ import annotations

from canvas_grammar.grammar.language import (
    Node,
    Ranges,
    chars,
    complement,
    either,
    intersection,
    literal,
    sequence,
    union,
)

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


# An escaped U+0000 is allowed, because its escape contains no U+0000.
ANY_CHARACTER = _any_character(null="0")
# For sets of characters: since `ANY` lacks U+0000, nothing says whether a set contains it, so it is
# left out.
ANY_BUT_NULL = _any_character(null="1")
# In strings of counted lengths: a character has half as many ways to be cut by tokens without the
# escapes of controls, of which no reader of a bounded string has a use.
ANY_BUT_CONTROLS = either([PLAIN, SHORT_ESCAPE])
QUOTE = literal('"')
