r"""Turn the tree of a pattern into the language of the texts in which it is found.

A part without assertions is a separate language. The meaning of an assertion depends on what stands
around it, so a part with assertions is read together with the language of everything after it (its
*rest*) and with what is known about the preceding character (`Before`). A lookahead anywhere is
then an intersection of its content with the rest, or a difference from it.

A language is an under- or an overapproximation. Every reader matches each text of the first; the
second holds every text that at least one reader matches. The texts that are offered are an
underapproximation, and those that are subtracted from it are an overapproximation.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from enum import Enum

from canvas_grammar.grammar.ecma import (
    ASCII_WORD,
    Ahead,
    Alternatives,
    Anchor,
    Characters,
    Repetition,
    Sequence,
    Tree,
    escaped_class,
)
from canvas_grammar.grammar.language import (
    EMPTY_TEXT,
    NOTHING,
    Chain,
    Either,
    Node,
    Ranges,
    Repeat,
    complement,
    either,
    intersection,
    optional,
    repeat,
    sequence,
)
from canvas_grammar.grammar.rules import Both, Without, both, without
from canvas_grammar.limits import ConstraintError

MOST_UNROLLED = 8
BOUNDARIES = frozenset((r"\b", r"\B"))
# Assertions whose meaning depends on the preceding character.
LOOKING_BACK = BOUNDARIES | {"^"}


class Before(Enum):
    """What is known about the character that precedes a part of a pattern."""

    START = 0  # there is none: the text begins here
    WORD = 1  # for every reader, one of a word
    OTHER = 2  # for every reader, not one of a word
    SOME = 3  # there is one


@dataclass(frozen=True)
class Writing:
    """How the characters of a text are written: those of ranges, and any one.

    No character is written in two ways.
    """

    leaf: Callable[[Ranges], Node]
    character: Node


def found_in(tree: Tree, writing: Writing, overapproximate: bool = False) -> Node:
    """The texts in which a pattern is found; see the module's docstring for `overapproximate`.

    An assertion that no automaton can follow where it stands is refused.
    """
    reader = _LanguageBuilder(writing, overapproximate)
    some = repeat(writing.character, 1, None)
    at_start = reader.part(tree, reader.anything, Before.START)
    if tree.assertions & BOUNDARIES:
        word, other = (
            reader.part(tree, reader.anything, before) for before in (Before.WORD, Before.OTHER)
        )
        later = either(
            sequence(reader.anything, writing.leaf(ranges), language)
            for ranges, language in ((ASCII_WORD, word), (_no_word(), other))
        )
    elif "^" in tree.assertions:
        later = sequence(some, reader.part(tree, reader.anything, Before.SOME))
    else:
        return sequence(reader.anything, at_start)
    return either([at_start, later])


def matched_by(tree: Tree, writing: Writing) -> Node:
    """The texts that a tree without assertions matches."""
    return _LanguageBuilder(writing, False).plain(tree)


def whole_text(tree: Tree) -> Tree | None:
    """The content of a pattern ``^...$`` whose content has no assertions, or None."""
    if isinstance(tree, Sequence) and len(tree.items) == 1:
        return whole_text(tree.items[0])
    if not isinstance(tree, Sequence) or len(tree.items) < 2:
        return None
    first, *middle, last = tree.items
    if not isinstance(first, Anchor) or not isinstance(last, Anchor):
        return None
    content = Sequence(tuple(middle))
    return content if (first.kind, last.kind) == ("^", "$") and not content.assertions else None


class _LanguageBuilder:
    """Reads trees that are written in one way."""

    def __init__(self, writing: Writing, overapproximate: bool) -> None:
        self.writing, self.overapproximate = writing, overapproximate
        self.anything = repeat(writing.character, 0, None)

    def plain(self, tree: Tree) -> Node:
        """The language of a tree; an assertion in it holds nowhere."""
        if isinstance(tree, Characters):
            return self.writing.leaf(tree.possible if self.overapproximate else tree.sure)
        if isinstance(tree, Sequence):
            return sequence(*map(self.plain, tree.items))
        if isinstance(tree, Alternatives):
            return either(map(self.plain, tree.options))
        if isinstance(tree, Repetition):
            return repeat(self.plain(tree.item), tree.least, tree.most)
        return NOTHING

    def part(self, tree: Tree, rest: Node, before: Before) -> Node:
        """The texts whose beginning `tree` matches and that continue as `rest` says."""
        if not tree.assertions:
            return sequence(self.plain(tree), rest)
        if isinstance(tree, Sequence):
            return self.items(tree.items, rest, before)
        if isinstance(tree, Alternatives):
            return either(self.part(option, rest, before) for option in tree.options)
        if isinstance(tree, Repetition):
            return self.repetition(tree, rest, before)
        if isinstance(tree, Ahead):
            inner = copy(self)
            inner.overapproximate = self.overapproximate != tree.negative
            content = inner.part(tree.content, inner.anything, before)
            if not tree.negative:
                return self.both(rest, content)
            return without(rest, content)
        assert isinstance(tree, Anchor)
        return self.anchor(tree.kind, rest, before)

    def items(self, items: tuple[Tree, ...], rest: Node, before: Before) -> Node:
        if not items:
            return rest
        plain = next((n for n, item in enumerate(items) if item.assertions), len(items))
        count = max(plain, 1)
        first: Tree = items[0] if count == 1 else Sequence(items[:count])
        after = Sequence(items[count:])
        least, most = first.width
        looks_back = after.assertions & LOOKING_BACK
        # If it may match nothing, only then does what follows begin where it begins.
        is_open = looks_back and least == 0 and most != 0
        if is_open and (after.assertions - {"^", "$"} or first.assertions):
            raise ConstraintError(
                r"^, \b or \B after a part of a pattern that may be empty is not supported"
            )
        moved = before if most == 0 else Before.SOME
        if looks_back and least > 0:
            moved = _moved(first)
        found = self.part(first, self.part(after, rest, moved), before)
        return either([self.part(after, rest, before), found]) if is_open else found

    def repetition(self, tree: Repetition, rest: Node, before: Before) -> Node:
        item = tree.item
        if tree.most is not None and tree.most <= MOST_UNROLLED:
            more = [Sequence((item,) * count) for count in range(tree.least, tree.most + 1)]
            return either(self.part(one, rest, before) for one in more)
        if tree.least > 1 or tree.most is not None or item.assertions - {"^", "$"}:
            raise ConstraintError("an assertion inside a repetition of a pattern is not supported")
        # ^ may hold in the first round only, and $ in the last one.
        last = self.part(item, rest, Before.SOME)
        inside = sequence(repeat(self.plain(item), 0, None), last)
        rounds = [self.part(item, rest, before), self.part(item, inside, before)]
        return either([*rounds, rest] if tree.least == 0 else rounds)

    def anchor(self, kind: str, rest: Node, before: Before) -> Node:
        if kind == "^":
            return rest if before is Before.START else NOTHING
        if kind == "$":
            # Python's $ holds before a line feed at the end of the text, too.
            if self.overapproximate:
                return self.both(rest, optional(self.writing.leaf(((0xA, 0xA),))))
            return EMPTY_TEXT if _nullable(rest) else NOTHING
        if self.overapproximate or before is Before.SOME:
            raise ConstraintError(
                rf"{kind} is supported only where it is sure whether the character before it "
                "belongs to a word"
            )
        word = self.both(rest, sequence(self.writing.leaf(ASCII_WORD), self.anything))
        no_word = sequence(self.writing.leaf(_no_word()), self.anything)
        other = self.both(rest, either([no_word, EMPTY_TEXT]))
        return word if (before is Before.WORD) == (kind == r"\B") else other

    def both(self, left: Node, right: Node) -> Node:
        if left is self.anything:
            return right
        if right is self.anything:
            return left
        return both(left, right)


def _moved(tree: Tree) -> Before:
    """What is known about the preceding character after a part of at least one character."""
    last = tree
    while not isinstance(last, Characters):
        if isinstance(last, Sequence) and last.items and last.items[-1].width[0] > 0:
            last = last.items[-1]
        elif isinstance(last, Repetition) and last.item.width[0] > 0:
            last = last.item
        else:
            return Before.SOME
    if intersection(last.sure, ASCII_WORD) == last.sure:
        return Before.WORD
    return Before.OTHER if intersection(last.sure, _no_word()) == last.sure else Before.SOME


def _no_word() -> Ranges:
    """Characters that no reader takes for word characters."""
    return complement(escaped_class("w").possible)


def _nullable(node: Node) -> bool:
    """Whether the empty text belongs to a language that calls no rules."""
    if isinstance(node, Chain):
        return all(map(_nullable, node.parts))
    if isinstance(node, Either):
        return any(map(_nullable, node.options))
    if isinstance(node, Repeat):
        return node.least == 0 or _nullable(node.part)
    if isinstance(node, Both):
        return _nullable(node.left) and _nullable(node.right)
    return isinstance(node, Without) and _nullable(node.left) and not _nullable(node.right)
