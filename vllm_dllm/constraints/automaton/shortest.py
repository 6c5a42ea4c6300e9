"""The fewest tokens to the end of a rule, and how many calls deep they lead."""

from __future__ import annotations

import numpy as np

from vllm_dllm.constraints.automaton.distance import NEVER
from vllm_dllm.constraints.automaton.outcomes import LEFT, Outcomes


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
    edge_state, parts = _edges(state, outcome, outcomes)
    owner: np.ndarray = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    flat = np.array([state for part in parts for state in part], dtype=np.int64)
    order = np.argsort(flat, kind="stable")
    first = np.asarray(np.searchsorted(flat[order], np.arange(len(may_leave) + 1)))
    missing = np.array([len(part) for part in parts])
    total: np.ndarray = np.ones(len(parts), dtype=np.int64)
    depth: np.ndarray = np.zeros(len(parts), dtype=np.int64)
    # How many calls are open while a part of an edge is read: the first is the innermost.
    level = np.concatenate([np.arange(len(part))[::-1] for part in parts]) if parts else flat
    tokens: np.ndarray = np.where(may_leave, 0, NEVER).astype(np.int64)
    calls: np.ndarray = np.zeros(len(may_leave), dtype=np.int64)
    waiting: dict[int, list[np.ndarray]] = {}
    now, count = np.flatnonzero(may_leave), 0
    while True:
        sizes = first[now + 1] - first[now]
        begin: np.ndarray = np.repeat(first[now] - (sizes.cumsum() - sizes), sizes)
        places = order[begin + np.arange(sizes.sum())]
        edges = owner[places]
        np.add.at(total, edges, tokens[flat[places]])
        np.maximum.at(depth, edges, calls[flat[places]] + level[places])
        np.subtract.at(missing, edges, 1)
        done = np.unique(edges)
        done = done[missing[done] == 0]
        for value in np.unique(total[done]).tolist():
            waiting.setdefault(value, []).append(done[total[done] == value])
        now = np.zeros(0, dtype=np.int64)
        while waiting and not len(now):
            count = min(waiting)
            ready = np.concatenate(waiting.pop(count))
            ready = ready[tokens[edge_state[ready]] == NEVER]
            # Of equally short endings, the one that makes the fewest calls.
            ready = ready[np.lexsort((depth[ready], edge_state[ready]))]
            now, chosen = np.unique(edge_state[ready], return_index=True)
            tokens[now], calls[now] = count, depth[ready[chosen]]
        if not len(now):
            return tokens, calls


def _edges(
    state: np.ndarray, outcome: np.ndarray, outcomes: Outcomes
) -> tuple[np.ndarray, list[tuple[int, ...]]]:
    """Ways to read one token: the state before it, and the states that must then end, each once.

    The first of those states is the innermost.
    """
    count = len(outcomes.alternatives)
    stays = np.array([any(inner != LEFT for _, inner in some) for some in outcomes.alternatives])
    # Neighbours are often equal: tokens inside a string all do the same.
    new = (np.diff(state, prepend=-1) != 0) | (np.diff(outcome, prepend=-1) != 0)
    new &= stays[outcome]
    state, outcome = state[new], outcome[new]
    before, numbers = np.divmod(np.unique(state.astype(np.int64) * count + outcome), count)
    states: list[int] = []
    parts: list[tuple[int, ...]] = []
    for source, number in zip(before.tolist(), numbers.tolist(), strict=True):
        for pushed, inner in outcomes.alternatives[number]:
            if inner != LEFT:
                states.append(source)
                parts.append((inner, *pushed[::-1]))
    return np.array(states, dtype=np.int64), parts
