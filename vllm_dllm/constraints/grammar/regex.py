"""Regular expressions of users, in Python's syntax and read by Python's own parser.

An expression means what `re.fullmatch` makes of it, so Python's parser reads it. What cannot become
an automaton, such as lookaround and references to groups, is refused by name. The ``pattern`` of a
JSON schema is in another dialect, ECMA-262: for it, only texts that both dialects match are
offered.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cache
from re import _constants as constants  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from vllm_dllm.constraints.grammar.language import (
    ANY,
    EMPTY_TEXT,
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
from vllm_dllm.constraints.limits import ConstraintError

REFUSED = {
    "ASSERT": "looking ahead or behind, (?=...) or (?<=...)",
    "ASSERT_NOT": "looking ahead or behind, (?!...) or (?<!...)",
    "GROUPREF": "references to groups",
    "GROUPREF_EXISTS": "conditions on groups",
    "POSSESSIVE_REPEAT": "possessive repetitions",
    "ATOMIC_GROUP": "atomic groups",
}
START = {"AT_BEGINNING", "AT_BEGINNING_STRING"}
END = {"AT_END", "AT_END_STRING"}


class PatternEnd(Enum):
    """The surroundings of one end of a part of a pattern."""

    INSIDE = 0  # another part of the pattern, so an anchor is refused here
    OPEN = 1  # the end of the pattern, beyond which any text may follow
    ANCHORED = 2  # the end of the pattern and of the text


@dataclass(frozen=True)
class Dialect:
    r"""What character classes mean in a dialect of regular expressions.

    Attributes:
        sure: ranges of ``\d``, ``\w`` and ``\s`` that every reader of the dialect agrees on.
        possible: ranges that at least one reader of the dialect takes for them.
        line_ends: characters that ``.`` does not match.
        flags: whether the dialect has inline flags such as ``(?i)``.
    """

    sure: dict[str, Ranges]
    possible: dict[str, Ranges]
    line_ends: Ranges
    flags: bool


def regex(text: str) -> Node:
    """The language of the texts that ``re.fullmatch(text, ...)`` accepts.

    Raises:
        ConstraintError: it is not a regular expression, or no automaton can follow it.
    """
    reader = _PatternReader(_python(), chars, chars(ANY))
    return reader.read(text, PatternEnd.ANCHORED)


def inner_regex(text: str) -> Node:
    """The language of an expression that is matched within a longer text, so without anchors.

    Raises:
        ConstraintError: as `regex`.
    """
    reader = _PatternReader(_python(), chars, chars(ANY))
    return reader.read(text, PatternEnd.INSIDE)


def load_unicode_tables() -> None:
    """Compute the character classes of Unicode now rather than with the first expression."""
    _schema()


def searched(text: str, leaf: Callable[[Ranges], Node], character: Node) -> Node:
    """The texts in which a JSON schema's ``pattern`` is found.

    Args:
        text: the pattern.
        leaf: from ranges to the language of how one of their characters is written.
        character: the language of how a character outside the match is written.

    Raises:
        ConstraintError: as `regex`.
    """
    return _PatternReader(_schema(), leaf, character).read(text, PatternEnd.OPEN)


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

    def __init__(self, dialect: Dialect, leaf: Callable[[Ranges], Node], character: Node) -> None:
        self.dialect = dialect
        self.leaf = leaf
        self.anything = repeat(character, 0, None)

    def read(self, text: str, edge: PatternEnd) -> Node:
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
        flags = tree.state.flags
        if not self.dialect.flags and flags & ~re.UNICODE:
            raise ConstraintError("a schema's pattern has no inline flags such as (?i)")
        return self.sequence(list(tree), (edge, edge), flags)

    def sequence(self, items: list[Any], edges: tuple[PatternEnd, PatternEnd], flags: int) -> Node:
        begin, end = edges
        while items and begin is not PatternEnd.INSIDE and _anchor(items[0]) in START:
            items, begin = items[1:], PatternEnd.ANCHORED
        while items and end is not PatternEnd.INSIDE and _anchor(items[-1]) in END:
            items, end = items[:-1], PatternEnd.ANCHORED
        if not items:
            return self.anything if PatternEnd.OPEN in (begin, end) else EMPTY_TEXT
        parts = []
        for n, item in enumerate(items):
            item_edges = (
                begin if n == 0 else PatternEnd.INSIDE,
                end if n == len(items) - 1 else PatternEnd.INSIDE,
            )
            parts.append(self.item(item, item_edges, flags))
        return sequence(*parts)

    def item(self, item: Any, edges: tuple[PatternEnd, PatternEnd], flags: int) -> Node:
        """An item of a sequence; groups and branches pass the ends on to their content."""
        name, value = str(item[0]), item[1]
        if name == "SUBPATTERN":
            _, added, removed, content = value
            if (added or removed) and not self.dialect.flags:
                raise ConstraintError("a schema's pattern has no inline flags such as (?i:...)")
            return self.sequence(list(content), edges, (flags | added) & ~removed)
        if name == "BRANCH":
            return either(self.sequence(list(content), edges, flags) for content in value[1])
        atom = self.atom(name, value, flags)
        leading, trailing = (self.anything if e is PatternEnd.OPEN else EMPTY_TEXT for e in edges)
        return sequence(leading, atom, trailing)

    def atom(self, name: str, value: Any, flags: int) -> Node:
        if name in ("MAX_REPEAT", "MIN_REPEAT"):
            least, most, content = value
            inside = self.sequence(list(content), (PatternEnd.INSIDE, PatternEnd.INSIDE), flags)
            return repeat(inside, least, None if most == constants.MAXREPEAT else most)
        if name == "ANY":
            ends = () if flags & re.DOTALL else self.dialect.line_ends
            return self.leaf(complement(ends))
        if name == "LITERAL":
            return self.leaf(_cased(((value, value),), flags))
        if name == "NOT_LITERAL":
            return self.leaf(complement(_cased(((value, value),), flags)))
        if name == "IN":
            return self.leaf(self.set(value, flags))
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
        """A set in brackets. A negated set leaves out whatever any reader takes for a member."""
        negated = str(items[0][0]) == "NEGATE"
        ranges: list[Range] = []
        for kind, value in items[negated:]:
            if str(kind) == "LITERAL":
                ranges.append((value, value))
            elif str(kind) == "RANGE":
                ranges.append(value)
            else:
                ranges += self.category(str(value), bool(flags & re.ASCII), negated)
        members = _cased(union(ranges), flags)
        return complement(members) if negated else members

    def category(self, name: str, ascii_only: bool, possible: bool) -> Ranges:
        opposite, name = "NOT_" in name, name.removeprefix("CATEGORY_").removeprefix("NOT_")
        dialect = _ascii() if ascii_only else self.dialect
        # A character is surely no digit if no reader takes it for one.
        sets = dialect.possible if possible != opposite else dialect.sure
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
def _python() -> Dialect:
    names = {"DIGIT": r"\d", "WORD": r"\w", "SPACE": r"\s"}
    sets = {name: _matching(text, 0) for name, text in names.items()}
    return Dialect(sets, sets, ((0xA, 0xA),), flags=True)


@cache
def _ascii() -> Dialect:
    sets = {
        "DIGIT": ((0x30, 0x39),),
        "WORD": ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)),
        "SPACE": ((0x9, 0xD), (0x20, 0x20)),
    }
    return Dialect(sets, sets, ((0xA, 0xA),), flags=True)


@cache
def _schema() -> Dialect:
    """The classes on which ECMA-262 and Python agree; ECMA's digits and words are ASCII."""
    ours, theirs = _python().sure, _ascii().sure
    # White space in ECMA-262: Unicode's category Zs, five controls, two line ends and U+FEFF.
    blank = union([*theirs["SPACE"], *((c, c) for c in (0xA0, 0x1680, 0x202F, 0x205F, 0x3000)),
                   (0x2000, 0x200A), (0x2028, 0x2029)])  # fmt: skip
    sure = {"DIGIT": theirs["DIGIT"], "WORD": theirs["WORD"], "SPACE": blank}
    possible = {**ours, "SPACE": union([*ours["SPACE"], *blank, (0xFEFF, 0xFEFF)])}
    return Dialect(sure, possible, ((0xA, 0xA), (0xD, 0xD), (0x2028, 0x2029)), flags=False)
