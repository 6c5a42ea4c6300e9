"""Which states of automata that call each other are of use."""

from __future__ import annotations

import numpy as np

from canvas_grammar.automaton.distance import DEAD, NEVER, fewest_steps, reachable


def alive_states(moves: np.ndarray, accepting: np.ndarray, calls: np.ndarray) -> np.ndarray:
    """The states from which a rule can end, bool ``[states]``: a call must be able to end, too."""
    source, target = _pairs(moves)
    ends: np.ndarray = np.zeros(len(calls), dtype=bool)
    while True:
        alive = (
            fewest_steps(
                np.concatenate([source, calls[ends, 0]]),
                np.concatenate([target, calls[ends, 2]]),
                accepting,
            )
            != NEVER
        )
        more = alive[calls[:, 1]] if len(calls) else ends
        if (more == ends).all():
            return alive
        ends = more


def used_states(moves: np.ndarray, calls: np.ndarray, alive: np.ndarray, start: int) -> np.ndarray:
    """The states that a text of the language can visit, bool ``[states]``; `start` is alive."""
    source, target = _pairs(moves)
    source = np.concatenate([source, calls[:, 0], calls[:, 0]])
    target = np.concatenate([target, calls[:, 1], calls[:, 2]])
    inside = alive[source] & alive[target]
    return reachable(source[inside], target[inside], np.arange(len(moves)) == start)


def _pairs(moves: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The pairs of states with a byte between them: sources and targets."""
    ordered = np.sort(moves, axis=1)
    new = ordered != DEAD
    new[:, 1:] &= ordered[:, 1:] != ordered[:, :-1]
    source, column = np.nonzero(new)
    return source, ordered[source, column].astype(np.int64)
