"""What single bytes do to a stack of rules."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from canvas_grammar.automaton.distance import DEAD
from canvas_grammar.automaton.equal_rows import equal_rows
from canvas_grammar.automaton.outcomes import Alternative, Outcomes
from canvas_grammar.automaton.rule_automata import RuleAutomata
from canvas_grammar.limits import ConstraintError


@dataclass(frozen=True)
class ByteMoves:
    """The outcomes of single bytes, in every state.

    Attributes:
        outcome: int32 ``[states, columns]``, the number of an outcome in which something is read.
        column_of_byte: int64 ``[256]``; bytes that act alike share a column.
        may_leave: bool ``[states]``, whether the rule of a state may end there.
        must_leave: bool ``[states]``, whether nothing can be read before the rule ends.
    """

    outcome: np.ndarray
    column_of_byte: np.ndarray
    may_leave: np.ndarray
    must_leave: np.ndarray


def byte_moves(automata: RuleAutomata, outcomes: Outcomes) -> ByteMoves:
    """The outcomes of single bytes.

    Raises:
        ConstraintError: a rule begins with a call of itself.
    """
    calls: dict[int, list[tuple[int, int]]] = {}
    for caller, start, back in automata.calls.tolist():
        calls.setdefault(caller, []).append((start, back))
    may_leave = _may_leave(automata)
    reads = (automata.next != DEAD).any(1)
    reads[list(calls)] = True
    moves = np.where(automata.next == DEAD, 0, automata.next + 1).astype(np.int32)
    reader = _Reader(automata, calls, may_leave, ~reads)
    for state in calls:
        for byte, alternatives in reader.read(state).items():
            moves[state, byte] = outcomes.number(alternatives)
    first, column_of_byte = equal_rows(np.ascontiguousarray(moves.T))
    return ByteMoves(np.ascontiguousarray(moves[:, first]), column_of_byte, may_leave, ~reads)


def _may_leave(automata: RuleAutomata) -> np.ndarray:
    """States in which a rule may end, also behind calls that read nothing; bool ``[states]``."""
    found = automata.accepting.copy()
    caller, start, back = automata.calls.T
    while True:
        more = caller[found[start] & found[back]]
        if found[more].all():
            return found
        found[more] = True


class _Reader:
    """Follows calls to the bytes that they read first."""

    def __init__(
        self,
        automata: RuleAutomata,
        calls: dict[int, list[tuple[int, int]]],
        may_leave: np.ndarray,
        must_leave: np.ndarray,
    ) -> None:
        self.automata, self.calls = automata, calls
        self.may_leave, self.must_leave = may_leave, must_leave
        self.known: dict[int, dict[int, set[Alternative]]] = {}
        self.open: set[int] = set()

    def read(self, state: int) -> dict[int, set[Alternative]]:
        """From each byte to its alternatives."""
        if state in self.known:
            return self.known[state]
        if state in self.open:
            raise ConstraintError("a rule begins with itself, so nothing says how deep it nests")
        self.open.add(state)
        row = self.automata.next[state]
        found: dict[int, set[Alternative]] = {
            byte: {((), int(row[byte]))} for byte in np.flatnonzero(row != DEAD).tolist()
        }
        for start, back in self.calls.get(state, ()):
            # A caller that has nothing left to read need not be returned to.
            pushed = () if self.must_leave[back] else (back,)
            for byte, alternatives in self.read(start).items():
                inner = {((*pushed, *p), s) for p, s in alternatives}
                found.setdefault(byte, set()).update(inner)
            if self.may_leave[start]:
                for byte, alternatives in self.read(back).items():
                    found.setdefault(byte, set()).update(alternatives)
        self.open.discard(state)
        self.known[state] = found
        return found
