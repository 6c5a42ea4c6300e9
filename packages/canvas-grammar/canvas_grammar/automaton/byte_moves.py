"""Compute what single bytes and texts do to a stack of rules, and where its callers continue."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from canvas_grammar.automaton.graph import DEAD, edges_of, equal_rows
from canvas_grammar.automaton.rule_automata import RuleAutomata
from canvas_grammar.limits import ConstraintError, spend

# ---- How a text changes a stack of rules: the reader stays in a rule, calls others, or leaves it.
#
# An *outcome* is a set of *alternatives*; it has more than one if the text can be read in several
# ways. An alternative is a pair of a tuple and a state:
#
# - ``(pushed, state)``: the reader is in `state`, and returns to the states `pushed`, last one
#   first, before it continues in the rule in which it began;
# - ``((suffix,), LEFT)``: the rule in which it began has ended, and the caller of the rule still
#   has to read a suffix of the text. The suffix is given by the number of its function.
#
# Outcomes are numbered. 0 has no alternatives, and ``1 + state`` means staying in the rule, in
# that state.

Alternative = tuple[tuple[int, ...], int]

NO_WAY = 0
LEFT = -1


class Outcomes:
    """Numbers of outcomes over a number of states."""

    def __init__(self, states: int) -> None:
        self.states = states
        self.alternatives: list[tuple[Alternative, ...]] = [
            (),
            *((((), state),) for state in range(states)),
        ]
        self._numbers: dict[frozenset[Alternative], int] = {frozenset(): NO_WAY}

    def number(self, alternatives: Iterable[Alternative]) -> int:
        """The number of a set of alternatives."""
        some = frozenset(alternatives)
        if len(some) == 1:
            (only,) = some
            if not only[0] and only[1] != LEFT:
                return 1 + only[1]
        number = self._numbers.setdefault(some, len(self.alternatives))
        if number == len(self.alternatives):
            self.alternatives.append(tuple(sorted(some)))
        return number


# ---- How single bytes change a stack of rules.


@dataclass(frozen=True)
class ByteMoves:
    """The outcomes of single bytes, in every state."""

    outcome: np.ndarray  # int32 ``[states, columns]``, of outcomes in which something is read
    column_of_byte: np.ndarray  # int64 ``[256]``; bytes that act alike share a column
    may_leave: np.ndarray  # bool ``[states]``, whether the rule of a state may end there
    must_leave: np.ndarray  # bool ``[states]``, whether nothing can be read before the rule ends


def byte_moves(automata: RuleAutomata, outcomes: Outcomes) -> ByteMoves:
    """The outcomes of single bytes; a rule that begins with a call of itself is refused."""
    calls: dict[int, list[tuple[int, int]]] = {}
    for caller, start, back in automata.calls.tolist():
        calls.setdefault(caller, []).append((start, back))
    may_leave = _may_leave(automata)
    reads = (automata.next != DEAD).any(1)
    reads[list(calls)] = True
    moves = np.where(automata.next == DEAD, 0, automata.next + 1).astype(np.int32)
    reader = _FirstSets(automata, calls, may_leave, ~reads)
    for state in calls:
        for byte, alternatives in reader.read(state).items():
            moves[state, byte] = outcomes.number(alternatives)
    first, column_of_byte = equal_rows(np.ascontiguousarray(moves.T))
    return ByteMoves(np.ascontiguousarray(moves[:, first]), column_of_byte, may_leave, ~reads)


def _may_leave(automata: RuleAutomata) -> np.ndarray:
    """States in which a rule may end, also after calls that read nothing; bool ``[states]``."""
    found = automata.accepting.copy()
    caller, start, back = automata.calls.T
    while True:
        more = caller[found[start] & found[back]]
        if found[more].all():
            return found
        found[more] = True


class _FirstSets:
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
            # There is no need to return to a caller that has nothing left to read.
            pushed = () if self.must_leave[back] else (back,)
            for byte, alternatives in self.read(start).items():
                inner = {((*pushed, *p), s) for p, s in alternatives}
                found.setdefault(byte, set()).update(inner)
            if self.may_leave[start]:
                for byte, alternatives in self.read(back).items():
                    found.setdefault(byte, set()).update(alternatives)
        self.open.discard(state)
        self.known[state] = found
        spend(sum(map(len, found.values())))
        return found


# ---- Where a rule's callers continue: the states that read what is left of a token when a rule
# ends.
#
# A rule may end after every character of a name, and leave the rest of the token to its caller.
# Nearly always no caller can read that rest. The calls alone show this.


@dataclass(frozen=True)
class Followers:
    """The states that read on after each state in which a rule may end, in groups; int64."""

    leaving: np.ndarray  # ``[n]``, the states in which a rule may end and a caller reads on
    group: np.ndarray  # ``[n]``, the group of each of them
    first: np.ndarray  # ``[groups]``, where each group begins in `states`; no group is empty
    states: np.ndarray  # the states of all groups, one group after the other

    @classmethod
    def from_automata(cls, automata: RuleAutomata, may_leave: np.ndarray) -> Followers:
        """Find the continuations of all rules; `may_leave` is that of `ByteMoves`."""
        starts = list(dict.fromkeys(automata.calls[:, 1].tolist()))
        ends: dict[int, set[int]] = {}  # from a state in which rules may end to their starts
        for start, inside in _inside(automata, starts).items():
            for state in inside:
                if may_leave[state]:
                    ends.setdefault(state, set()).add(start)
        backs: dict[int, set[int]] = {start: set() for start in starts}
        for _, start, back in automata.calls.tolist():
            backs[start].add(back)
        reached = _closed(backs, ends)
        # Most states belong to the same rules as others.
        of_rules: dict[frozenset[int], frozenset[int]] = {}
        number: dict[frozenset[int], int] = {}
        leaving = sorted(ends)
        group = []
        for state in leaving:
            rules = frozenset(ends[state])
            if rules not in of_rules:
                of_rules[rules] = frozenset().union(*(reached[start] for start in rules))
            group.append(number.setdefault(of_rules[rules], len(number)))
        groups = [sorted(states) for states in number]
        return cls(
            np.array(leaving, dtype=np.int64),
            np.array(group, dtype=np.int64),
            np.cumsum([0, *map(len, groups)], dtype=np.int64)[:-1],
            np.array([state for states in groups for state in states], dtype=np.int64),
        )

    def read(self, reads: np.ndarray) -> np.ndarray:
        """Whether any state after a leaving state reads a text, bool ``[texts, n]``.

        `reads`, bool ``[texts, states]``, is where each text can be read without leaving first.
        """
        if not len(self.leaving):
            return np.zeros((len(reads), 0), dtype=bool)
        by_group = np.logical_or.reduceat(reads[:, self.states], self.first, axis=1)
        return np.asarray(by_group)[:, self.group]


def _inside(automata: RuleAutomata, starts: list[int]) -> dict[int, set[int]]:
    """The states of each rule, by its start. Rules may share states."""
    after: list[list[int]] = [[] for _ in range(automata.states)]
    for state, target in zip(*(part.tolist() for part in edges_of(automata.next)), strict=True):
        after[state].append(target)
    for caller, _, back in automata.calls.tolist():
        after[caller].append(back)
    found = {}
    for start in starts:
        inside, ahead = {start}, [start]
        while ahead:
            more = [state for state in after[ahead.pop()] if state not in inside]
            inside.update(more)
            ahead += more
        found[start] = inside
        spend(len(inside))
    return found


def _closed(backs: dict[int, set[int]], ends: dict[int, set[int]]) -> dict[int, set[int]]:
    """For each rule, by its start, the states that may read on when it ends.

    `backs` are the states that calls of a rule return to, and `ends` the rules that may end in a
    state, which are then left as well.
    """
    outer = {
        start: set().union(*(ends.get(back, set()) for back in some))
        for start, some in backs.items()
    }
    found = {}
    for start in backs:
        seen, ahead = {start}, [start]
        while ahead:
            reached = outer[ahead.pop()]
            spend(1 + len(reached) // 96)
            more = reached - seen
            seen |= more
            ahead += more
        found[start] = set().union(*(backs[each] for each in seen))
    return found
