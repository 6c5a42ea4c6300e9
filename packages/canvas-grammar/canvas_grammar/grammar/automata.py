"""Languages given as automata, where an expression for them would be huge: multiples of 7."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from canvas_grammar.grammar.language import NOTHING, Node
from canvas_grammar.limits import ConstraintError

State = TypeVar("State", bound=Hashable)


@dataclass(frozen=True, eq=False)
class Automaton(Node):
    """The texts that a deterministic automaton accepts; it starts in state 0.

    Attributes:
        moves: for each state, from a byte, as the character of that number, to the state behind
            it. Every state can be reached, and can reach an accepting one.
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
        moves: from a state to the characters that may come next, and the states behind them. No
            state may be reached from itself.
        accepts: whether a text may end in a state.
        most_states: a cap on the states that are looked at.

    Raises:
        ConstraintError: there are more than `most_states`.
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
