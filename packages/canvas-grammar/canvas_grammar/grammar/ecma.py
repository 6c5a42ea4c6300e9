"""Parse regular expressions of ECMA-262 into trees.

Readers disagree on some character sets: a digit of ECMA-262 is ASCII, and one of Python is any
digit of Unicode. So each set says which characters surely belong to it, and which possibly do.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import groupby

from canvas_grammar.grammar.language import (
    ANY,
    LAST,
    Range,
    Ranges,
    complement,
    intersection,
    union,
)
from canvas_grammar.limits import ConstraintError

LOOK = "(?"  # the kind of a lookahead
Width = tuple[int, int | None]


@dataclass(frozen=True, eq=False)
class Tree:
    """A part of a regular expression."""

    @cached_property
    def width(self) -> Width:
        """Characters that it matches at least and at most; None means any number."""
        return self._width()

    @cached_property
    def assertions(self) -> frozenset[str]:
        r"""The kinds of its assertions: ``^``, ``$``, ``\b``, ``\B`` and `LOOK`."""
        return frozenset(self._own).union(*(part.assertions for part in self._parts()))

    @property
    def _own(self) -> tuple[str, ...]:
        return ()

    def _width(self) -> Width:
        return 0, 0

    def _parts(self) -> tuple[Tree, ...]:
        return ()


@dataclass(frozen=True, eq=False)
class Characters(Tree):
    """One character.

    Attributes:
        sure: characters that every reader matches.
        possible: characters that at least one reader matches.
    """

    sure: Ranges
    possible: Ranges

    def _width(self) -> Width:
        return 1, 1


@dataclass(frozen=True, eq=False)
class Sequence(Tree):
    """One item after the other."""

    items: tuple[Tree, ...]

    def _parts(self) -> tuple[Tree, ...]:
        return self.items

    def _width(self) -> Width:
        return _joined(self.items, sum, sum)


@dataclass(frozen=True, eq=False)
class Alternatives(Tree):
    """One of two or more options."""

    options: tuple[Tree, ...]

    def _parts(self) -> tuple[Tree, ...]:
        return self.options

    def _width(self) -> Width:
        return _joined(self.options, min, max)


def _joined(
    trees: tuple[Tree, ...], least: Callable[[list[int]], int], most: Callable[[list[int]], int]
) -> Width:
    known = [tree.width[1] for tree in trees if tree.width[1] is not None]
    narrowest = least([tree.width[0] for tree in trees])
    return narrowest, most(known) if len(known) == len(trees) else None


@dataclass(frozen=True, eq=False)
class Repetition(Tree):
    """`least` to `most` times an item; None means any number of times."""

    item: Tree
    least: int
    most: int | None

    def _parts(self) -> tuple[Tree, ...]:
        return (self.item,)

    def _width(self) -> Width:
        least, most = self.item.width
        if most == 0 or self.most == 0:
            return 0, 0
        return least * self.least, None if None in (most, self.most) else most * self.most  # type: ignore[operator]


@dataclass(frozen=True, eq=False)
class Anchor(Tree):
    r"""One of ``^``, ``$``, ``\b`` and ``\B``."""

    kind: str

    @property
    def _own(self) -> tuple[str, ...]:
        return (self.kind,)


@dataclass(frozen=True, eq=False)
class Ahead(Tree):
    """A lookahead: what follows begins with `content`, or, if negative, does not."""

    content: Tree
    negative: bool

    @property
    def _own(self) -> tuple[str, ...]:
        return (LOOK,)

    def _parts(self) -> tuple[Tree, ...]:
        return (self.content,)


# ---- Character classes of ECMA-262: what ``\d``, ``.`` and ``\p{L}`` stand for.
#
# `possible` also holds what Python's `re` matches, because many validators search with it.
# Unicode's categories are those of the table of this Python (`unicodedata.unidata_version`).
# Characters that this table does not know yet may get any category in another version: they
# possibly belong to each.

# Names of general categories besides their two letters, as ECMA-262 lists them.
CATEGORY_NAMES = {
    **{"Letter": "L", "Cased_Letter": "LC", "Uppercase_Letter": "Lu", "Lowercase_Letter": "Ll"},
    **{"Titlecase_Letter": "Lt", "Modifier_Letter": "Lm", "Other_Letter": "Lo", "Mark": "M"},
    **{"Combining_Mark": "M", "Nonspacing_Mark": "Mn", "Spacing_Mark": "Mc"},
    **{"Enclosing_Mark": "Me", "Number": "N", "Decimal_Number": "Nd", "digit": "Nd"},
    **{"Letter_Number": "Nl", "Other_Number": "No", "Punctuation": "P", "punct": "P"},
    **{"Connector_Punctuation": "Pc", "Dash_Punctuation": "Pd", "Open_Punctuation": "Ps"},
    **{"Close_Punctuation": "Pe", "Initial_Punctuation": "Pi", "Final_Punctuation": "Pf"},
    **{"Other_Punctuation": "Po", "Symbol": "S", "Math_Symbol": "Sm", "Currency_Symbol": "Sc"},
    **{"Modifier_Symbol": "Sk", "Other_Symbol": "So", "Separator": "Z", "Space_Separator": "Zs"},
    **{"Line_Separator": "Zl", "Paragraph_Separator": "Zp", "Other": "C", "Control": "Cc"},
    **{"cntrl": "Cc", "Format": "Cf", "Surrogate": "Cs", "Private_Use": "Co", "Unassigned": "Cn"},
}
ASCII_DIGIT: Ranges = ((0x30, 0x39),)
ASCII_WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
LINE_FEED: Ranges = ((0xA, 0xA),)
LINE_ENDS: Ranges = ((0xA, 0xA), (0xD, 0xD), (0x2028, 0x2029))
# White space for both: five controls, category Zs and two line ends. ECMA-262 adds U+FEFF.
BLANK = union([(0x9, 0xD), (0x20, 0x20), (0x2000, 0x200A), (0x2028, 0x2029),
               *((code, code) for code in (0xA0, 0x1680, 0x202F, 0x205F, 0x3000))])  # fmt: skip


def exactly(ranges: Ranges) -> Characters:
    """A set that all readers agree on; `ranges` must be as from `union`."""
    within = intersection(ranges, ANY)
    return Characters(within, within)


def negated(one: Characters) -> Characters:
    """All other characters."""
    return Characters(complement(one.possible), complement(one.sure))


def together(sets: list[Characters]) -> Characters:
    """The characters of all the sets."""
    return Characters(
        union(pair for one in sets for pair in one.sure),
        union(pair for one in sets for pair in one.possible),
    )


@cache
def escaped_class(letter: str) -> Characters:
    r"""The set of ``\d``, ``\w`` or ``\s``, or with a capital letter all others."""
    if letter.isupper():
        return negated(escaped_class(letter.lower()))
    if letter == "s":
        return Characters(BLANK, union([*matched_by_python(r"\s"), *BLANK, (0xFEFF, 0xFEFF)]))
    return Characters(
        ASCII_DIGIT if letter == "d" else ASCII_WORD, matched_by_python(rf"\{letter}")
    )


@cache
def dot() -> Characters:
    """The set of ``.``: in Python, only U+000A is the end of a line."""
    return Characters(complement(LINE_ENDS), complement(LINE_FEED))


@cache
def property_class(name: str) -> Characters:
    r"""The set of ``\p{name}``, which is a general category or one of a few other properties."""
    key, _, value = name.rpartition("=")
    fixed: dict[str, Ranges] = {
        **{"Any": ANY, "ASCII": ((0x1, 0x7F),)},
        **dict.fromkeys(("AHex", "ASCII_Hex_Digit"), ((0x30, 0x39), (0x41, 0x46), (0x61, 0x66))),
    }
    if not key and value in fixed:
        return exactly(fixed[value])
    category = CATEGORY_NAMES.get(value, value)
    if key not in ("", "gc", "General_Category") or category not in CATEGORY_NAMES.values():
        raise ConstraintError(
            rf"\p{{{name}}} is not supported; general categories such as \p{{L}} are"
        )
    known = _categories()
    wanted = ("Lu", "Ll", "Lt") if category == "LC" else (category,)
    members = [pair for label in known if label.startswith(wanted) for pair in known[label]]
    unassigned = union(known["Cn"])
    return Characters(
        intersection(union(members), complement(unassigned)), union([*members, *unassigned])
    )


@cache
def _every_character() -> str:
    return "".join(map(chr, range(LAST + 1)))


@cache
def matched_by_python(text: str, flags: int = 0) -> Ranges:
    """The characters that a one-character expression of Python matches."""
    found = re.finditer(f"(?:{text})+", _every_character(), flags)
    return union((match.start(), match.end() - 1) for match in found)


@cache
def _categories() -> dict[str, list[Range]]:
    """The ranges of each general category."""
    found: dict[str, list[Range]] = {}
    for label, run in groupby(range(LAST + 1), lambda code: unicodedata.category(chr(code))):
        codes = list(run)
        found.setdefault(label, []).append((codes[0], codes[-1]))
    return {label: list(intersection(union(pairs), ANY)) for label, pairs in found.items()}


# ---- A parser of ECMA-262's regular expressions, the dialect of JSON Schema's patterns.
#
# It reads them with the flag ``u``, as JSON Schema says. Schemas also hold expressions that only
# readers without the flag accept, such as ``\-`` outside brackets or a single ``}``. They are
# read where their meaning without the flag (ECMA-262, Annex B) is the one that Python gives them.

SYNTAX = frozenset("^$\\.*+?()[]{}|/")
CONTROLS = {"t": 0x9, "n": 0xA, "v": 0xB, "f": 0xC, "r": 0xD}
QUANTIFIER = re.compile(r"\{([0-9]+)(,([0-9]*))?\}")
PYTHON_QUANTIFIER = re.compile(r"\{,[0-9]*\}")
HEX = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]+)\}")
TRAIL = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})")
GROUP_NAME = re.compile(r"\(\?<([A-Za-z_$][A-Za-z0-9_$]*)>")
PLANE = ((0x0, 0xFFFF),)  # characters that a reader without the flag takes for one character
# Constructs of other dialects: how each begins, and what it is.
OTHER_GROUPS = {
    "(?<=": "lookbehind, (?<=...)",
    "(?<!": "lookbehind, (?<!...)",
    "(?P": "Python's (?P...)",
    "(?#": "a comment, (?#...)",
    "(?>": "an atomic group, (?>...)",
}


def parse(text: str) -> Tree:
    """The tree of a regular expression, without what readers disagree on, which is refused."""
    try:
        return _Parser(text).pattern()
    except RecursionError as error:
        raise ConstraintError("the pattern nests too deeply") from error


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.names: set[str] = set()
        self.without_flag = False  # whether only readers without the flag accept it
        self.with_flag = False  # whether it means something else without the flag

    def pattern(self) -> Tree:
        tree = self.alternatives()
        if self.at < len(self.text):
            raise self.wrong("unbalanced )")
        if self.without_flag and self.with_flag:
            raise self.refused(r"\u{...} or \p{...} together with what the flag u forbids")
        return _in_plane(tree) if self.without_flag else tree

    def wrong(self, what: str) -> ConstraintError:
        return ConstraintError(
            f"the pattern is not a regular expression of ECMA-262: {what} at position {self.at}"
        )

    def refused(self, what: str) -> ConstraintError:
        return ConstraintError(f"{what} is not supported in a pattern")

    def ahead(self, text: str) -> bool:
        return self.text.startswith(text, self.at)

    def take(self, text: str) -> bool:
        found = self.ahead(text)
        self.at += len(text) * found
        return found

    def match(self, expression: re.Pattern[str]) -> re.Match[str] | None:
        found = expression.match(self.text, self.at)
        self.at = found.end() if found else self.at
        return found

    def alternatives(self) -> Tree:
        options = [self.sequence()]
        while self.take("|"):
            options.append(self.sequence())
        return options[0] if len(options) == 1 else Alternatives(tuple(options))

    def sequence(self) -> Tree:
        items = []
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            items.append(self.term())
        return items[0] if len(items) == 1 else Sequence(tuple(items))

    def term(self) -> Tree:
        atom = self.atom()
        counts = self.counts()
        if counts is None:
            return atom
        if isinstance(atom, Anchor | Ahead):
            raise self.wrong("repetition of an assertion")
        self.take("?")  # a lazy repetition matches the same texts
        if self.ahead("+"):
            raise self.refused("a possessive repetition")
        if self.text[self.at : self.at + 1] in {"*", "?"} or QUANTIFIER.match(self.text, self.at):
            raise self.wrong("nothing to repeat")
        return Repetition(atom, *counts)

    def counts(self) -> tuple[int, int | None] | None:
        for sign, counts in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self.take(sign):
                return counts
        if PYTHON_QUANTIFIER.match(self.text, self.at):
            raise self.refused("{,n}, which only Python reads as a repetition,")
        if not (found := self.match(QUANTIFIER)):
            return None
        if max(len(found[1]), len(found[3] or "")) > 9:
            raise self.refused("a repetition of more than 999,999,999 times")
        least = int(found[1])
        most = least if found[2] is None else int(found[3]) if found[3] else None
        if most is not None and most < least:
            raise self.wrong("repetition counts out of order")
        return least, most

    def atom(self) -> Tree:
        char = self.text[self.at]
        if char == "(":
            return self.group()
        if PYTHON_QUANTIFIER.match(self.text, self.at):
            raise self.refused("{,n}, which only Python reads as a repetition,")
        if char in "*+?" or QUANTIFIER.match(self.text, self.at):
            raise self.wrong("nothing to repeat")
        self.at += 1
        if char in "^$":
            return Anchor(char)
        if char == ".":
            return dot()
        if char == "[":
            return self.brackets()
        if char == "\\":
            if self.text[self.at : self.at + 1] in {"b", "B"}:
                self.at += 1
                return Anchor("\\" + self.text[self.at - 1])
            found = self.escape(in_brackets=False)
            return _one(found) if isinstance(found, int) else found
        self.without_flag |= char in "]{}"
        return _one(ord(char))

    def group(self) -> Tree:
        for begin, what in OTHER_GROUPS.items():
            if self.ahead(begin):
                raise self.refused(what)
        kind = next((kind for kind in ("(?:", "(?=", "(?!") if self.take(kind)), "")
        if not kind and (named := self.match(GROUP_NAME)):
            if named[1] in self.names:
                raise self.wrong(f"a second group {named[1]}")
            self.names.add(named[1])
        elif not kind:
            if self.ahead("(?"):
                raise self.refused("a group with flags, such as (?i),")
            self.at += 1
        content = self.alternatives()
        if not self.take(")"):
            raise self.wrong("missing )")
        if kind in ("(?=", "(?!"):
            return Ahead(content, kind == "(?!")
        # Unlike an assertion itself, a group of it may be repeated.
        return Sequence((content,)) if isinstance(content, Anchor | Ahead) else content

    def brackets(self) -> Tree:
        inverted = self.take("^")
        if self.ahead("]"):
            raise self.refused("[] or [^], which Python reads in another way,")
        members = []
        while not self.take("]"):
            first = self.member()
            if self.ahead("-") and not self.ahead("-]"):
                self.at += 1
                last = self.member()
                if not isinstance(first, int) or not isinstance(last, int):
                    raise self.wrong("a range in brackets that begins or ends with a class")
                if last < first:
                    raise self.wrong("a range in brackets out of order")
                members.append(exactly(((first, last),)))
            else:
                members.append(_one(first) if isinstance(first, int) else first)
        return negated(together(members)) if inverted else together(members)

    def member(self) -> int | Characters:
        """A member of a set in brackets: the code point of a character, or a class."""
        if self.at >= len(self.text):
            raise self.wrong("missing ]")
        char = self.text[self.at]
        self.at += 1
        if char != "\\":
            return ord(char)
        if self.take("b"):
            return 0x8
        return self.escape(in_brackets=True)

    def escape(self, in_brackets: bool) -> int | Characters:
        """Read the rest of an escape: the code point of a character, or a class."""
        if found := self.match(HEX):
            return self.code_point(found)
        char = self.text[self.at : self.at + 1]
        self.at += 1
        if not char:
            raise self.wrong("a backslash at the end")
        if char in "dDsSwW":
            return escaped_class(char)
        if char in CONTROLS:
            return CONTROLS[char]
        if char in "pP":
            if not (named := self.match(re.compile(r"\{([A-Za-z_=0-9]+)\}"))):
                raise self.wrong(rf"\{char} without a property in braces")
            found_class = property_class(named[1])
            self.with_flag = True
            return found_class if char == "p" else negated(found_class)
        if char == "c" and re.match("[A-Za-z]", self.text[self.at : self.at + 1]):
            self.at += 1
            return ord(self.text[self.at - 1]) % 32
        if char == "0" and not self.text[self.at : self.at + 1].isdigit():
            return 0
        if char in "123456789k":
            raise self.refused(rf"a reference to a group, such as \{char},")
        if char.isascii() and char.isalnum():
            raise self.refused(rf"\{char}, which ECMA-262 does not have,")
        self.without_flag |= char not in SYNTAX and not (in_brackets and char == "-")
        return ord(char)

    def code_point(self, found: re.Match[str]) -> int:
        code = int(found[1] or found[2] or found[3], 16)
        self.with_flag |= bool(found[3])
        if code > LAST:
            raise self.wrong("a code point beyond Unicode")
        if found[2] and 0xD800 <= code <= 0xDBFF and (trail := self.match(TRAIL)):
            return 0x10000 + ((code - 0xD800) << 10) + int(trail[1], 16) - 0xDC00
        if 0xD800 <= code <= 0xDFFF:
            raise self.refused("a half of a surrogate pair")
        return code


def _one(code: int) -> Characters:
    return exactly(((code, code),))


def _in_plane(tree: Tree) -> Tree:
    """The tree with only those characters that every reader without the flag takes for one."""
    if isinstance(tree, Characters):
        sure = intersection(tree.sure, PLANE)
        if tree.possible and not sure and intersection(tree.possible, PLANE) == ():
            raise ConstraintError(
                "a character beyond U+FFFF is not supported in a pattern that ECMA-262 accepts "
                "only without the flag u"
            )
        return Characters(sure, tree.possible)
    if isinstance(tree, Sequence):
        return Sequence(tuple(map(_in_plane, tree.items)))
    if isinstance(tree, Alternatives):
        return Alternatives(tuple(map(_in_plane, tree.options)))
    if isinstance(tree, Repetition):
        return Repetition(_in_plane(tree.item), tree.least, tree.most)
    if isinstance(tree, Ahead):
        return Ahead(_in_plane(tree.content), tree.negative)
    return tree
