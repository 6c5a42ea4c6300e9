"""The fewest tokens to the end of a rule, and how many calls deep they lead."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from canvas_grammar.automaton.distance import NEVER
from canvas_grammar.automaton.outcomes import LEFT, Outcomes


def shortest_endings(
    state: np.ndarray, outcome: np.ndarray, outcomes: Outcomes, may_leave: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """How a rule ends soonest from each state, if every call in it ends at the edge of a token.

    The number of tokens to the end of a whole text is then the sum over its rules. It is never too
    small. It may be too large, because a token may also end several rules at once.

    Args:
        state: int ``[n]``, states in which some token can be read.
        outcome: int ``[n]``, an outcome of it.
        outcomes: the numbers of outcomes.
        may_leave: bool ``[states]``, whether a rule may end in a state.

    Returns:
        The tokens, int64 ``[states]``, `NEVER` where there is no such ending; and the calls inside
        each other that this ending makes, int64 ``[states]``.
    """
    ways = _Ways.of(state, outcome, outcomes, len(may_leave))
    total: np.ndarray = np.ones(ways.count, dtype=np.int64)
    depth: np.ndarray = np.zeros(ways.count, dtype=np.int64)
    missing = np.bincount(ways.way, minlength=ways.count)
    tokens: np.ndarray = np.where(may_leave, 0, NEVER).astype(np.int64)
    calls: np.ndarray = np.zeros(len(may_leave), dtype=np.int64)
    waiting: dict[int, list[np.ndarray]] = {}
    now, count = np.flatnonzero(may_leave), 0
    while True:
        places, _ = _members(ways.first, now)
        some = ways.way[places]
        np.add.at(total, some, tokens[ways.state[places]])
        np.maximum.at(depth, some, calls[ways.state[places]] + ways.level[places])
        np.subtract.at(missing, some, 1)
        done = np.unique(some)
        done = done[missing[done] == 0]
        for value in np.unique(total[done]).tolist():
            waiting.setdefault(value, []).append(done[total[done] == value])
        now = np.zeros(0, dtype=np.int64)
        while waiting and not len(now):
            count = min(waiting)
            ready = np.concatenate(waiting.pop(count))
            edges, sizes = _members(ways.edge_first, ready)
            source = ways.edge_state[edges]
            deep: np.ndarray = np.repeat(depth[ready], sizes)
            fresh = tokens[source] == NEVER
            source, deep = source[fresh], deep[fresh]
            # Of equally short endings, the one that makes the fewest calls.
            order = np.lexsort((deep, source))
            now, chosen = np.unique(source[order], return_index=True)
            tokens[now], calls[now] = count, deep[order[chosen]]
        if not len(now):
            return tokens, calls


def _members(first: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The places of the members of some groups, and how many each group has.

    Args:
        first: int64 ``[all groups + 1]``, where the members of each group begin.
        groups: int64 ``[n]``.
    """
    sizes = first[groups + 1] - first[groups]
    begin: np.ndarray = np.repeat(first[groups] - (sizes.cumsum() - sizes), sizes)
    return begin + np.arange(sizes.sum()), sizes


@dataclass(frozen=True)
class _Ways:
    """Ways to go on: states that must all end, and the states of which a token leads there.

    All arrays but `count` are int64.

    Attributes:
        count: number of ways. Way ``n`` is that of rule state ``n`` alone; others follow.
        first: ``[states + 1]``, where each state begins in the next three.
        state, way, level: ``[n]``, a state, a way that it is part of, and how many calls are open
            while it is read.
        edge_first: ``[ways + 1]``, where each way begins in the next one.
        edge_state: ``[edges]``, a state of which a token leads to the way.
    """

    count: int
    first: np.ndarray
    state: np.ndarray
    way: np.ndarray
    level: np.ndarray
    edge_first: np.ndarray
    edge_state: np.ndarray

    @classmethod
    def of(cls, state: np.ndarray, outcome: np.ndarray, outcomes: Outcomes, states: int) -> _Ways:
        """Of edges, as in `shortest_endings`."""
        # From the outermost state to the innermost one.
        special = [
            [(*pushed, inner) for pushed, inner in some if inner != LEFT]
            for some in outcomes.alternatives[1 + states :]
        ]
        longer = [part for some in special for part in some]
        members = [*range(states), *(member for part in longer for member in part)]
        lengths = np.array([1] * states + [len(part) for part in longer], dtype=np.int64)
        way: np.ndarray = np.repeat(np.arange(len(lengths)), lengths)
        level = np.concatenate([np.zeros(states), *(np.arange(len(part)) for part in longer)])
        flat = np.array(members, dtype=np.int64)
        order = np.argsort(flat, kind="stable")
        first = np.asarray(np.searchsorted(flat[order], np.arange(states + 1)))
        # The ways of each outcome: a plain one has the way of its state.
        counts = np.array([0] + [1] * states + [len(some) for some in special], dtype=np.int64)
        # Neighbours are often equal: tokens inside a string all do the same.
        new = (np.diff(state, prepend=-1) != 0) | (np.diff(outcome, prepend=-1) != 0)
        pairs = np.unique(state[new].astype(np.int64) * len(counts) + outcome[new])
        source, number = np.divmod(pairs, len(counts))
        target, sizes = _members(np.concatenate([[0], counts.cumsum()]), number)
        source = np.repeat(source, sizes)
        by_target = np.argsort(target, kind="stable")
        edge_first = np.asarray(np.searchsorted(target[by_target], np.arange(len(lengths) + 1)))
        return cls(
            len(lengths), first, flat[order], way[order], level.astype(np.int64)[order],
            edge_first, source[by_target],
        )  # fmt: skip
