r"""A parser of ECMA-262's regular expressions, the dialect of JSON Schema's patterns.

It reads them with the flag ``u``, as JSON Schema says. Schemas also hold expressions that only
readers without the flag accept, such as ``\-`` outside of brackets or a single ``}``. They are read
where their meaning without the flag (ECMA-262, Annex B) is the one that Python gives them.
"""

from __future__ import annotations

import re

from canvas_grammar.grammar.ecma_classes import (
    dot,
    escaped_class,
    exactly,
    negated,
    property_class,
    together,
)
from canvas_grammar.grammar.ecma_tree import (
    Ahead,
    Alternatives,
    Anchor,
    Characters,
    Repetition,
    Sequence,
    Tree,
)
from canvas_grammar.grammar.language import LAST, intersection
from canvas_grammar.limits import ConstraintError

SYNTAX = frozenset("^$\\.*+?()[]{}|/")
CONTROLS = {"t": 0x9, "n": 0xA, "v": 0xB, "f": 0xC, "r": 0xD}
QUANTIFIER = re.compile(r"\{([0-9]+)(,([0-9]*))?\}")
PYTHON_QUANTIFIER = re.compile(r"\{,[0-9]*\}")
HEX = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]+)\}")
TRAIL = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})")
GROUP_NAME = re.compile(r"\(\?<([A-Za-z_$][A-Za-z0-9_$]*)>")
PLANE = ((0x0, 0xFFFF),)  # characters that a reader without the flag takes for one character
# What other dialects have, from how it begins to what it is.
OTHER_GROUPS = {
    "(?<=": "looking behind, (?<=...)",
    "(?<!": "looking behind, (?<!...)",
    "(?P": "Python's (?P...)",
    "(?#": "a comment, (?#...)",
    "(?>": "an atomic group, (?>...)",
}


def parse(text: str) -> Tree:
    """The tree of a regular expression.

    Raises:
        ConstraintError: it is not one, or holds what no automaton can follow, or what readers
            disagree on.
    """
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
            f"the pattern is no regular expression of ECMA-262: {what} at position {self.at}"
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
        """What follows a backslash: the code point of a character, or a class."""
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
