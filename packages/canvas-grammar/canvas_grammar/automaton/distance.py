"""Shortest distances in the graph of an automaton."""

from __future__ import annotations

import numpy as np

# In a table of transitions: no state.
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


def reachable(source: np.ndarray, target: np.ndarray, start: np.ndarray) -> np.ndarray:
    """Which states can be reached from the `start` states, which count too; bool ``[states]``."""
    return fewest_steps(target, source, start) != NEVER
