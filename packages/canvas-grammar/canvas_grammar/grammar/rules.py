"""Rules: named languages that other languages call, and that may call themselves.

A tree of `language` without a `Call` is a regular language. A rule is compiled once, however often
it is called, and a call returns to where it was made. So the language of a tree with calls is
context-free, and its texts may nest as deeply as the stack of an automaton allows.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from canvas_grammar.grammar.language import NOTHING, Chain, Either, Node, Repeat


class Rule:
    """A language that is called by its identity.

    Attributes:
        name: for messages.
        body: the language; it may be set after the rule has been called, and may call it.
    """

    def __init__(self, name: str, body: Node = NOTHING) -> None:
        self.name = name
        self.body = body


@dataclass(frozen=True, eq=False)
class Call(Node):
    """The language of a rule. The rule must not begin with a call of itself."""

    rule: Rule

    def __post_init__(self) -> None:
        self._measured(3, 8)


@dataclass(frozen=True, eq=False)
class Both(Node):
    """The texts of two regular languages, which call no rules."""

    left: Node
    right: Node

    def inside(self) -> tuple[Node, ...]:
        """The two languages."""
        return (self.left, self.right)

    def __post_init__(self) -> None:
        self._measured(3, 8, self.left.empty or self.right.empty)


@dataclass(frozen=True, eq=False)
class Without(Node):
    """The texts of one regular language that another one lacks; neither calls rules."""

    left: Node
    right: Node

    def inside(self) -> tuple[Node, ...]:
        """The two languages."""
        return (self.left, self.right)

    def __post_init__(self) -> None:
        self._measured(3, 8, self.left.empty)


@dataclass(frozen=True, eq=False)
class Behind(Node):
    """What follows a first text in the texts of a language that begin with it.

    A list such as ``(,a)?(,b)?(,c)?`` is of linear size only with a comma in front of each item;
    `Behind` takes the first comma away.

    Attributes:
        first: the text, which no call of `rest` may begin.
        rest: a language that may call rules.
    """

    first: str
    rest: Node

    def inside(self) -> tuple[Node, ...]:
        """The language."""
        return (self.rest,)

    def __post_init__(self) -> None:
        self._measured(3, 8, self.rest.empty)


def is_empty(node: Node, empty: Collection[Node]) -> bool:
    """Whether a language has no text, given others without any, which may be parts of it."""
    known = {id(each.rule) if isinstance(each, Call) else id(each) for each in empty}
    return _is_empty(node, known)


def _is_empty(node: Node, known: Collection[int]) -> bool:
    if node.empty or (id(node.rule) if isinstance(node, Call) else id(node)) in known:
        return True
    inside = (_is_empty(part, known) for part in node.inside())
    if isinstance(node, Chain):
        return any(inside)
    if isinstance(node, Either):
        return all(inside)
    return isinstance(node, Repeat) and node.least > 0 and any(inside)
