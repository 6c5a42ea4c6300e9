"""Define rules: named languages that other languages call, and that may call themselves.

A rule is compiled once, however often it is called, and a call returns to where it was made. So
the language of a tree with calls is context-free, and its texts may nest as deeply as the stack of
an automaton allows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from canvas_grammar.grammar.language import NOTHING, Chain, Either, Node, Repeat
from canvas_grammar.limits import ConstraintError, spend

# ---- Languages given as automata, where an expression for them would be huge: multiples of 7.

State = TypeVar("State", bound=Hashable)


@dataclass(frozen=True, eq=False)
class Automaton(Node):
    """The texts that a deterministic automaton accepts; it starts in state 0.

    Attributes:
        moves: for each state, a mapping from a byte, as the character of that number, to the state
            after it. Every state can be reached, and can reach an accepting one.
        accepting: for each state, whether a text may end there.
    """

    moves: tuple[Mapping[str, int], ...]
    accepting: tuple[bool, ...]

    def __post_init__(self) -> None:
        self._measured(len(self.moves), 8)


def finite_automaton(
    start: State,
    moves: Callable[[State], Iterable[tuple[str, State]]],
    accepts: Callable[[State], bool],
    most_states: int,
) -> Node:
    """The smallest automaton of a finite language, or `NOTHING`.

    Args:
        start: the first state.
        moves: maps a state to the characters that may come next, and the states after them. No
            state may be reached from itself.
        accepts: whether a text may end in a state.
        most_states: a cap on the states that are examined; more are refused.
    """
    # Equal states have equal rows. None is the number of a state without texts.
    number: dict[State, int | None] = {}
    rows: dict[tuple[bool, tuple[tuple[str, int], ...]], int] = {}
    opened: dict[State, list[tuple[str, State]]] = {}
    stack = [start]
    while stack:
        state = stack[-1]
        if state not in opened:
            if len(opened) == most_states:
                raise ConstraintError(f"it takes more than {most_states} states")
            opened[state] = list(moves(state))
            spend(8 * len(opened[state]))
            stack += [target for _, target in opened[state] if target not in opened]
            continue
        stack.pop()
        if state in number:
            continue
        found = [(char, number[target]) for char, target in opened[state]]
        row = accepts(state), tuple((char, place) for char, place in found if place is not None)
        number[state] = rows.setdefault(row, len(rows)) if any(row) else None
    last = number[start]
    if last is None:
        return NOTHING
    # The start is the last row, because all others can be reached from it.
    return Automaton(
        tuple({char: last - place for char, place in row} for _, row in reversed(rows)),
        tuple(accepting for accepting, _ in reversed(rows)),
    )


class Rule:
    """A language that is called by its identity; its name is for messages.

    Its body may be set after the rule has been called, and may call it.
    """

    def __init__(self, name: str, body: Node = NOTHING) -> None:
        self.name, self.body = name, body


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

    def __post_init__(self) -> None:
        self._measured(3, 8, self.left.empty or self.right.empty, (self.left, self.right))


@dataclass(frozen=True, eq=False)
class Without(Node):
    """The texts of one regular language that another one lacks; neither calls rules."""

    left: Node
    right: Node

    def __post_init__(self) -> None:
        self._measured(3, 8, self.left.empty, (self.left, self.right))


def both(left: Node, right: Node) -> Node:
    """The texts of two languages, see `Both`."""
    return NOTHING if left.empty or right.empty else Both(left, right)


def without(left: Node, right: Node) -> Node:
    """The texts of one language that another one lacks, see `Without`."""
    return left if left.empty or right.empty else Without(left, right)


@dataclass(frozen=True, eq=False)
class WithoutFirst(Node):
    """The texts of a language that begin with a first text, without that text.

    A list such as ``(,a)?(,b)?(,c)?`` is of linear size only with a comma in front of each item;
    `WithoutFirst` takes the first comma away. No call of `rest` may begin with the text.
    """

    first: str
    rest: Node

    def __post_init__(self) -> None:
        self._measured(3, 8, self.rest.empty, (self.rest,))


def node_id(node: Node) -> int:
    """A number by which nodes are told apart: all calls of a rule have one."""
    return id(node.rule) if isinstance(node, Call) else id(node)


def is_empty(node: Node, empty: Collection[int]) -> bool:
    """Whether a language has no text, given the `node_id` of parts without any."""
    if node.empty or node_id(node) in empty:
        return True
    inside = (is_empty(part, empty) for part in node.inside())
    if isinstance(node, Chain):
        return any(inside)
    if isinstance(node, Either):
        return all(inside)
    return isinstance(node, Repeat) and node.least > 0 and any(inside)


# Languages of up to this many byte positions are cheaper where they are used than as a rule.
MOST_INLINE_POSITIONS = 40
REMEMBERED = 4096  # languages


def shared(name: str, language: Node) -> Node:
    """A call of a rule of this name, or the language itself if it is small."""
    if language.positions <= MOST_INLINE_POSITIONS:
        return language
    return Call(Rule(name, language))
