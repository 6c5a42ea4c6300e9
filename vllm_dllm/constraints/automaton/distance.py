"""How far it is to the end: the fewest steps from each state of an automaton to a goal."""

from __future__ import annotations

import numpy as np

# No state.
DEAD = -1
NEVER = np.iinfo(np.int32).max


def fewest_steps(source: np.ndarray, target: np.ndarray, goal: np.ndarray) -> np.ndarray:
    """The fewest edges from each state to a goal.

    Args:
        source: int ``[edges]``, states that edges leave.
        target: int ``[edges]``, states that they lead to.
        goal: bool ``[states]``.

    Returns:
        int32 ``[states]``; 0 for goals, `NEVER` for states that lead to none.
    """
    states = len(goal)
    # Edges by target, so that those into a state lie together.
    order = np.argsort(target, kind="stable")
    into = source[order]
    first = np.asarray(np.searchsorted(target[order], np.arange(states + 1)))
    distance: np.ndarray = np.where(goal, 0, NEVER).astype(np.int32)
    frontier, steps = np.flatnonzero(goal), 0
    while len(frontier):
        steps += 1
        counts = first[frontier + 1] - first[frontier]
        begin: np.ndarray = np.repeat(first[frontier] - (counts.cumsum() - counts), counts)
        before = np.unique(into[begin + np.arange(counts.sum())])
        frontier = before[distance[before] == NEVER]
        distance[frontier] = steps
    return distance


def reachable(source: np.ndarray, target: np.ndarray, start: np.ndarray) -> np.ndarray:
    """Bool ``[states]``: states that edges lead to from a start (bool ``[states]``), and it."""
    return fewest_steps(target, source, start) != NEVER
