"""Read users' regular expressions, which are in Python's syntax, with Python's own parser.

An expression has the meaning that `re.fullmatch` gives it, so Python's parser reads it. Constructs
that cannot become an automaton, such as lookaround and references to groups, are refused by name.
The ``pattern`` of a JSON schema is in another dialect, which `ecma` reads.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from functools import cache
from re import _constants as constants  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from canvas_grammar.grammar.ecma import (
    ASCII_DIGIT,
    ASCII_WORD,
    LINE_FEED,
    escaped_class,
)
from canvas_grammar.grammar.language import (
    LAST,
    Node,
    Range,
    Ranges,
    chars,
    complement,
    either,
    literal,
    repeat,
    sequence,
    union,
)
from canvas_grammar.limits import ConstraintError

REFUSED = {
    "ASSERT": "lookahead or lookbehind, (?=...) or (?<=...)",
    "ASSERT_NOT": "lookahead or lookbehind, (?!...) or (?<!...)",
    "GROUPREF": "references to groups",
    "GROUPREF_EXISTS": "conditions on groups",
    "POSSESSIVE_REPEAT": "possessive repetitions",
    "ATOMIC_GROUP": "atomic groups",
}
ASCII_CLASSES: dict[str, Ranges] = {
    "DIGIT": ASCII_DIGIT,
    "WORD": ASCII_WORD,
    "SPACE": ((0x9, 0xD), (0x20, 0x20)),
}
START = {"AT_BEGINNING", "AT_BEGINNING_STRING"}
END = {"AT_END", "AT_END_STRING"}


def regex(text: str) -> Node:
    """The language of the texts that ``re.fullmatch(text, ...)`` accepts.

    Raises:
        ConstraintError: it is not a regular expression, or no automaton can follow it.
    """
    return _PatternReader().read(text)


def inner_regex(text: str) -> Node:
    """The language of an expression that is matched within a longer text, so without anchors.

    Raises:
        ConstraintError: as for `regex`.
    """
    return _PatternReader().read(text, at_the_ends=False)


def load_unicode_tables() -> None:
    """Compute the character classes of Unicode now rather than with the first expression."""
    for letter in "dDsSwW":
        escaped_class(letter)
    _python()


def choice(options: Iterable[str]) -> Node:
    """Exactly one of some texts.

    Raises:
        ConstraintError: there are none, or one is not a string or cannot be written in UTF-8.
    """
    texts = list(options)
    if not texts:
        raise ConstraintError("choice is empty: there is nothing to choose from")
    for text in texts:
        if not isinstance(text, str):
            raise ConstraintError(f"choice: {text!r} is not a string")
        if any(ord(char) == 0 or 0xD800 <= ord(char) <= 0xDFFF for char in text):
            raise ConstraintError(f"choice: {text!r} holds U+0000 or a surrogate")
    return either(literal(text) for text in dict.fromkeys(texts))


class _PatternReader:
    """Turns the tree of Python's parser into a language."""

    def read(self, text: str, at_the_ends: bool = True) -> Node:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore"
                )  # about ambiguous sets, which `re` reads in the same way
                tree = parser.parse(text)
        except (re.error, OverflowError) as error:
            raise ConstraintError(f"not a regular expression: {error}") from error
        except RecursionError as error:
            raise ConstraintError("the regular expression nests too deeply") from error
        return self.sequence(list(tree), (at_the_ends, at_the_ends), tree.state.flags)

    def sequence(self, items: list[Any], edges: tuple[bool, bool], flags: int) -> Node:
        """A sequence of items; `edges` says whether it stands at the text's two ends."""
        begin, end = edges
        while items and begin and _anchor(items[0]) in START:
            items = items[1:]
        while items and end and _anchor(items[-1]) in END:
            items = items[:-1]
        last = len(items) - 1
        return sequence(
            *(
                self.item(item, (begin and n == 0, end and n == last), flags)
                for n, item in enumerate(items)
            )
        )

    def item(self, item: Any, edges: tuple[bool, bool], flags: int) -> Node:
        """An item of a sequence; groups and branches pass the ends on to their content."""
        name, value = str(item[0]), item[1]
        if name == "SUBPATTERN":
            _, added, removed, content = value
            return self.sequence(list(content), edges, (flags | added) & ~removed)
        if name == "BRANCH":
            return either(self.sequence(list(content), edges, flags) for content in value[1])
        return self.atom(name, value, flags)

    def atom(self, name: str, value: Any, flags: int) -> Node:
        if name in ("MAX_REPEAT", "MIN_REPEAT"):
            least, most, content = value
            inside = self.sequence(list(content), (False, False), flags)
            return repeat(inside, least, None if most == constants.MAXREPEAT else most)
        if name == "ANY":
            return chars(complement(() if flags & re.DOTALL else LINE_FEED))
        if name == "LITERAL":
            return chars(_cased(((value, value),), flags))
        if name == "NOT_LITERAL":
            return chars(complement(_cased(((value, value),), flags)))
        if name == "IN":
            return chars(self.set(value, flags))
        if name == "AT":
            raise ConstraintError(
                f"{_written_anchor(str(value))} is supported only at the ends of a regular "
                "expression" + (r" (and \b, \B nowhere)" if "BOUNDARY" in str(value) else "")
            )
        raise ConstraintError(
            f"{REFUSED.get(name, name)} cannot be followed by an automaton; rewrite the regular "
            "expression without it"
        )

    def set(self, items: list[Any], flags: int) -> Ranges:
        """A set in brackets."""
        negated = str(items[0][0]) == "NEGATE"
        ranges: list[Range] = []
        for kind, value in items[negated:]:
            if str(kind) == "LITERAL":
                ranges.append((value, value))
            elif str(kind) == "RANGE":
                ranges.append(value)
            else:
                ranges += self.category(str(value), bool(flags & re.ASCII))
        members = _cased(union(ranges), flags)
        return complement(members) if negated else members

    def category(self, name: str, ascii_only: bool) -> Ranges:
        opposite, name = "NOT_" in name, name.removeprefix("CATEGORY_").removeprefix("NOT_")
        sets = ASCII_CLASSES if ascii_only else _python()
        if name not in sets:
            raise ConstraintError(f"character class {name.lower()} is not supported")
        return complement(sets[name]) if opposite else sets[name]


def _anchor(item: Any) -> str:
    return str(item[1]) if str(item[0]) == "AT" else ""


def _written_anchor(name: str) -> str:
    return {"AT_BEGINNING": "^", "AT_END": "$", "AT_BEGINNING_STRING": r"\A"}.get(
        name, {"AT_END_STRING": r"\Z"}.get(name, r"\b")
    )


def _cased(ranges: Ranges, flags: int) -> Ranges:
    """With ``(?i)``, the ranges and all their other cases, as `re` itself matches them."""
    if not flags & re.IGNORECASE or not ranges:
        return ranges
    inside = "".join(f"{re.escape(chr(first))}-{re.escape(chr(last))}" for first, last in ranges)
    return _matching(f"[{inside}]", flags & (re.IGNORECASE | re.ASCII))


@cache
def _every_character() -> str:
    return "".join(map(chr, range(LAST + 1)))


@cache
def _matching(text: str, flags: int) -> Ranges:
    """Ranges of the characters that a one-character pattern matches."""
    runs = re.finditer(f"(?:{text})+", _every_character(), flags)
    return union((match.start(), match.end() - 1) for match in runs)


@cache
def _python() -> dict[str, Ranges]:
    """The characters that Python's character classes match."""
    names = {"DIGIT": r"\d", "WORD": r"\w", "SPACE": r"\s"}
    return {name: _matching(text, 0) for name, text in names.items()}
