"""Read users' regular expressions, which are in Python's syntax, with Python's own parser.

Constructs that cannot become an automaton, such as lookaround and references to groups, are refused
by name. The ``pattern`` of a JSON schema is in another dialect, which `ecma` reads.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from re import _constants as constants  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from canvas_grammar.grammar.ecma import (
    ASCII_DIGIT,
    ASCII_WORD,
    LINE_FEED,
    escaped_class,
    matched_by_python,
)
from canvas_grammar.grammar.language import (
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
START = {"AT_BEGINNING": "^", "AT_BEGINNING_STRING": r"\A"}
END = {"AT_END": "$", "AT_END_STRING": r"\Z"}
ANCHORS = START | END


def regex(text: str, at_the_ends: bool = True) -> Node:
    """The language of the texts that ``re.fullmatch(text, ...)`` accepts.

    An expression that is matched within a longer text (not `at_the_ends`) has no anchors.

    Raises:
        ConstraintError: it is not a regular expression, or no automaton can follow it.
    """
    try:
        with warnings.catch_warnings():
            # Warnings are about ambiguous sets, which `re` reads in the same way.
            warnings.simplefilter("ignore")
            tree = parser.parse(text)
    except (re.error, OverflowError) as error:
        raise ConstraintError(f"not a regular expression: {error}") from error
    except RecursionError as error:
        raise ConstraintError("the regular expression nests too deeply") from error
    return _sequence(list(tree), (at_the_ends, at_the_ends), tree.state.flags)


def load_unicode_tables() -> None:
    """Compute the character classes of Unicode now rather than with the first expression."""
    for letter in "dDsSwW":
        escaped_class(letter)


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


def _sequence(items: list[Any], edges: tuple[bool, bool], flags: int) -> Node:
    """A sequence of items; `edges` says whether it stands at the text's two ends."""
    begin, end = edges
    while items and begin and _anchor(items[0]) in START:
        items = items[1:]
    while items and end and _anchor(items[-1]) in END:
        items = items[:-1]
    last = len(items) - 1
    return sequence(
        *(_item(item, (begin and n == 0, end and n == last), flags) for n, item in enumerate(items))
    )


def _item(item: Any, edges: tuple[bool, bool], flags: int) -> Node:
    """An item of a sequence; groups and branches pass the ends on to their content."""
    name, value = str(item[0]), item[1]
    if name == "SUBPATTERN":
        _, added, removed, content = value
        return _sequence(list(content), edges, (flags | added) & ~removed)
    if name == "BRANCH":
        return either(_sequence(list(content), edges, flags) for content in value[1])
    return _atom(name, value, flags)


def _atom(name: str, value: Any, flags: int) -> Node:
    if name in ("MAX_REPEAT", "MIN_REPEAT"):
        least, most, content = value
        inside = _sequence(list(content), (False, False), flags)
        return repeat(inside, least, None if most == constants.MAXREPEAT else most)
    if name == "ANY":
        return chars(complement(() if flags & re.DOTALL else LINE_FEED))
    if name == "LITERAL":
        return chars(_cased(((value, value),), flags))
    if name == "NOT_LITERAL":
        return chars(complement(_cased(((value, value),), flags)))
    if name == "IN":
        return chars(_set(value, flags))
    if name == "AT":
        anchor = ANCHORS.get(str(value), r"\b")
        raise ConstraintError(
            f"{anchor} is supported only at the ends of a regular expression"
            + (r" (and \b, \B nowhere)" if "BOUNDARY" in str(value) else "")
        )
    raise ConstraintError(
        f"{REFUSED.get(name, name)} cannot be followed by an automaton; rewrite the regular "
        "expression without it"
    )


def _set(items: list[Any], flags: int) -> Ranges:
    """A set in brackets."""
    negated = str(items[0][0]) == "NEGATE"
    ranges: list[Range] = []
    for kind, value in items[negated:]:
        if str(kind) == "LITERAL":
            ranges.append((value, value))
        elif str(kind) == "RANGE":
            ranges.append(value)
        else:
            ranges += _category(str(value), bool(flags & re.ASCII))
    members = _cased(union(ranges), flags)
    return complement(members) if negated else members


def _category(name: str, ascii_only: bool) -> Ranges:
    opposite, name = "NOT_" in name, name.removeprefix("CATEGORY_").removeprefix("NOT_")
    if name not in ASCII_CLASSES:
        raise ConstraintError(f"character class {name.lower()} is not supported")
    found = ASCII_CLASSES[name] if ascii_only else matched_by_python("\\" + name[0].lower())
    return complement(found) if opposite else found


def _anchor(item: Any) -> str:
    return str(item[1]) if str(item[0]) == "AT" else ""


def _cased(ranges: Ranges, flags: int) -> Ranges:
    """With ``(?i)``, the ranges and all their other cases, as `re` itself matches them."""
    if not flags & re.IGNORECASE or not ranges:
        return ranges
    inside = "".join(f"{re.escape(chr(first))}-{re.escape(chr(last))}" for first, last in ranges)
    return matched_by_python(f"[{inside}]", flags & (re.IGNORECASE | re.ASCII))
