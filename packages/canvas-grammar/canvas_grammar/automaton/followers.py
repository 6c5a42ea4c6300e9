"""Where a rule's callers go on: the states that read what a token still holds when a rule ends.

A rule may end after every character of a name, and leave the rest of the token to whoever called
it. Nearly always no caller can read that rest. Known from the calls alone, this keeps apart only
tokens that some text tells apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from canvas_grammar.automaton.distance import DEAD
from canvas_grammar.automaton.rule_automata import RuleAutomata


@dataclass(frozen=True)
class Followers:
    """The states that read on behind each state in which a rule may end, in groups.

    Attributes:
        leaving: int64 ``[n]``, the states in which a rule may end and somebody reads on, ascending.
        group: int64 ``[n]``, the group of each of them.
        first: int64 ``[groups]``, where each group begins in `states`; no group is empty.
        states: int64, the states of all groups, one group after the other.
    """

    leaving: np.ndarray
    group: np.ndarray
    first: np.ndarray
    states: np.ndarray

    @classmethod
    def of(cls, automata: RuleAutomata, may_leave: np.ndarray) -> Followers:
        """Of all rules; `may_leave` is that of `ByteMoves`."""
        starts = list(dict.fromkeys(automata.calls[:, 1].tolist()))
        ends: dict[int, set[int]] = {}  # from a state in which rules may end to their starts
        for start, inside in _inside(automata, starts).items():
            for state in inside:
                if may_leave[state]:
                    ends.setdefault(state, set()).add(start)
        backs: dict[int, set[int]] = {start: set() for start in starts}
        for _, start, back in automata.calls.tolist():
            backs[start].add(back)
        behind = _closed(backs, ends)
        # Most states belong to the same rules as others.
        of_rules: dict[frozenset[int], frozenset[int]] = {}
        number: dict[frozenset[int], int] = {}
        leaving = sorted(ends)
        group = []
        for state in leaving:
            rules = frozenset(ends[state])
            if rules not in of_rules:
                of_rules[rules] = frozenset().union(*(behind[start] for start in rules))
            group.append(number.setdefault(of_rules[rules], len(number)))
        groups = [sorted(states) for states in number]
        return cls(
            np.array(leaving, dtype=np.int64),
            np.array(group, dtype=np.int64),
            np.cumsum([0, *map(len, groups)], dtype=np.int64)[:-1],
            np.array([state for states in groups for state in states], dtype=np.int64),
        )

    def read(self, reads: np.ndarray) -> np.ndarray:
        """Whether anybody behind a leaving state reads a text, bool ``[texts, n]``.

        Args:
            reads: bool ``[texts, states]``, where each text can be read without leaving first.
        """
        if not len(self.leaving):
            return np.zeros((len(reads), 0), dtype=bool)
        return np.asarray(np.logical_or.reduceat(reads[:, self.states], self.first, axis=1))[
            :, self.group
        ]


def _inside(automata: RuleAutomata, starts: list[int]) -> dict[int, set[int]]:
    """The states of each rule, by its start. Rules may share states."""
    ordered = np.sort(automata.next, axis=1)
    new = ordered != DEAD
    new[:, 1:] &= ordered[:, 1:] != ordered[:, :-1]
    source, column = np.nonzero(new)
    after: list[list[int]] = [[] for _ in range(automata.states)]
    for state, target in zip(source.tolist(), ordered[source, column].tolist(), strict=True):
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
    return found


def _closed(backs: dict[int, set[int]], ends: dict[int, set[int]]) -> dict[int, set[int]]:
    """For each rule, by its start, the states that may read on when it ends.

    Args:
        backs: the states that calls of a rule return to.
        ends: the rules that may end in a state, which are then left as well.
    """
    outer = {
        start: set().union(*(ends.get(back, set()) for back in some))
        for start, some in backs.items()
    }
    found = {}
    for start in backs:
        seen, ahead = {start}, [start]
        while ahead:
            more = outer[ahead.pop()] - seen
            seen |= more
            ahead += more
        found[start] = set().union(*(backs[each] for each in seen))
    return found
