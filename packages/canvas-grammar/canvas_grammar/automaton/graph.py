"""Treat automata as graphs: find distances, equal rows of their tables, and useful states."""

from __future__ import annotations

import numpy as np

# Stands for no state in a table of transitions.
DEAD = -1
# The distance of a state that leads to no goal.
NEVER = np.iinfo(np.int32).max


def fewest_steps(source: np.ndarray, target: np.ndarray, goal: np.ndarray) -> np.ndarray:
    """The fewest edges from each state to any goal.

    Args:
        source: int ``[edges]``, the state that each edge leaves.
        target: int ``[edges]``, the state that it leads to.
        goal: bool ``[states]``.

    Returns:
        int32 ``[states]``; 0 for goals, `NEVER` for states that lead to none.
    """
    states = len(goal)
    # Sort the edges by target, so that the edges into a state are adjacent.
    order = np.argsort(target, kind="stable")
    into = source[order]
    first = np.asarray(np.searchsorted(target[order], np.arange(states + 1)))
    distance: np.ndarray = np.where(goal, 0, NEVER).astype(np.int32)
    frontier, steps = np.flatnonzero(goal), 0
    while len(frontier):
        steps += 1
        counts = first[frontier + 1] - first[frontier]
        begin: np.ndarray = np.repeat(first[frontier] - (counts.cumsum() - counts), counts)
        predecessors = np.unique(into[begin + np.arange(counts.sum())])
        frontier = predecessors[distance[predecessors] == NEVER]
        distance[frontier] = steps
    return distance


def equal_rows(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Groups of equal rows, in the order of their first rows.

    The first row of each group, int64 ``[groups]``, and the group of each row, int64 ``[rows]``.
    """
    # Rows are hashed, and compared with the first of their group.
    weights = np.random.default_rng(0).integers(1, 1 << 62, size=rows.shape[1], dtype=np.int64)
    keys = rows.astype(np.int64) @ weights
    _, first, group = np.unique(keys, return_index=True, return_inverse=True)
    group = group.reshape(-1)
    if not np.array_equal(rows, rows[first[group]]):
        _, first, group = np.unique(rows, axis=0, return_index=True, return_inverse=True)
        group = group.reshape(-1)
    order = np.argsort(first, kind="stable")
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    return first[order], number[group]


def alive_states(moves: np.ndarray, accepting: np.ndarray, calls: np.ndarray) -> np.ndarray:
    """The states from which a rule can end, bool ``[states]``: a call must be able to end, too."""
    source, target = edges_of(moves)
    ends: np.ndarray = np.zeros(len(calls), dtype=bool)
    while True:
        sources = np.concatenate([source, calls[ends, 0]])
        targets = np.concatenate([target, calls[ends, 2]])
        alive = fewest_steps(sources, targets, accepting) != NEVER
        more = alive[calls[:, 1]] if len(calls) else ends
        if (more == ends).all():
            return alive
        ends = more


def used_states(moves: np.ndarray, calls: np.ndarray, alive: np.ndarray, start: int) -> np.ndarray:
    """The states that a text of the language can visit, bool ``[states]``; `start` is alive."""
    source, target = edges_of(moves)
    source = np.concatenate([source, calls[:, 0], calls[:, 0]])
    target = np.concatenate([target, calls[:, 1], calls[:, 2]])
    inside = alive[source] & alive[target]
    steps = fewest_steps(target[inside], source[inside], np.arange(len(moves)) == start)
    return np.asarray(steps != NEVER)


def edges_of(moves: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The pairs of states with a byte between them: sources, ascending, and targets."""
    ordered = np.sort(moves, axis=1)
    new = ordered != DEAD
    new[:, 1:] &= ordered[:, 1:] != ordered[:, :-1]
    source, column = np.nonzero(new)
    return source, ordered[source, column].astype(np.int64)
