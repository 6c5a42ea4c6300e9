"""Regular expressions of ECMA-262 as trees.

Readers disagree on some character sets: a digit of ECMA-262 is ASCII, and one of Python is any
digit of Unicode. So each set says which characters surely belong to it, and which possibly do.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from canvas_grammar.grammar.language import Ranges

ANCHORS = ("^", "$", r"\b", r"\B")
LOOK = "(?"  # the kind of a lookahead


@dataclass(frozen=True, eq=False)
class Tree:
    """A part of a regular expression."""

    @property
    def parts(self) -> tuple[Tree, ...]:
        """The trees that it is made of."""
        return ()

    @cached_property
    def width(self) -> tuple[int, int | None]:
        """Characters that it matches at least and at most; None means any number."""
        return 0, 0

    @cached_property
    def assertions(self) -> frozenset[str]:
        """The kinds of its assertions: members of `ANCHORS`, and `LOOK`."""
        return frozenset().union(*(part.assertions for part in self.parts))


@dataclass(frozen=True, eq=False)
class Characters(Tree):
    """One character.

    Attributes:
        sure: characters that every reader matches.
        possible: characters that at least one reader matches.
    """

    sure: Ranges
    possible: Ranges

    @cached_property
    def width(self) -> tuple[int, int | None]:
        """One character."""
        return 1, 1


@dataclass(frozen=True, eq=False)
class Sequence(Tree):
    """One item behind the other."""

    items: tuple[Tree, ...]

    @property
    def parts(self) -> tuple[Tree, ...]:
        """The items."""
        return self.items

    @cached_property
    def width(self) -> tuple[int, int | None]:
        """The sum of its items' widths."""
        most = [item.width[1] for item in self.items]
        known = [count for count in most if count is not None]
        least = sum(item.width[0] for item in self.items)
        return least, sum(known) if len(known) == len(most) else None


@dataclass(frozen=True, eq=False)
class Alternatives(Tree):
    """One of several options, of which there are at least two."""

    options: tuple[Tree, ...]

    @property
    def parts(self) -> tuple[Tree, ...]:
        """The options."""
        return self.options

    @cached_property
    def width(self) -> tuple[int, int | None]:
        """From the narrowest option to the widest."""
        most = [option.width[1] for option in self.options]
        known = [count for count in most if count is not None]
        least = min(option.width[0] for option in self.options)
        return least, max(known) if len(known) == len(most) else None


@dataclass(frozen=True, eq=False)
class Repetition(Tree):
    """`least` to `most` times an item; None means any number of times."""

    item: Tree
    least: int
    most: int | None

    @property
    def parts(self) -> tuple[Tree, ...]:
        """The item."""
        return (self.item,)

    @cached_property
    def width(self) -> tuple[int, int | None]:
        """The item's width times the counts."""
        least, most = self.item.width
        if most == 0 or self.most == 0:
            return 0, 0
        return least * self.least, None if None in (most, self.most) else most * self.most  # type: ignore[operator]


@dataclass(frozen=True, eq=False)
class Anchor(Tree):
    """A member of `ANCHORS`."""

    kind: str

    @cached_property
    def assertions(self) -> frozenset[str]:
        """Its kind."""
        return frozenset((self.kind,))


@dataclass(frozen=True, eq=False)
class Ahead(Tree):
    """A lookahead: what follows begins with `content`, or, if negative, does not."""

    content: Tree
    negative: bool

    @property
    def parts(self) -> tuple[Tree, ...]:
        """The content."""
        return (self.content,)

    @cached_property
    def assertions(self) -> frozenset[str]:
        """That it is a lookahead, and the kinds inside."""
        return self.content.assertions | {LOOK}
