"""Test helper: every path through a small canvas, found by trying them all.

The dynamic programming of `vllm_dllm.constraints.decoding.best_path` must agree with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vllm_dllm.constraints.automaton.distance import DEAD
from vllm_dllm.constraints.automaton.token_automaton import TokenAutomaton

FREE = -1


def every_path(
    automaton: TokenAutomaton,
    weights: Sequence[Sequence[float]],
    state: int,
    left: int,
    forced: Sequence[int] | None = None,
) -> Iterator[tuple[tuple[int, ...], float]]:
    """The classes of each path, and its weight.

    Args:
        automaton: the constraint.
        weights: of each position of the window, of each class.
        state: before the window.
        left: tokens that may be put out behind the window.
        forced: a token for each position, or -1; None for no token.
    """
    if not weights:
        if int(automaton.distance[state]) <= left:
            yield (), 0.0
        return
    token = FREE if forced is None else forced[0]
    kinds = range(automaton.classes) if token == FREE else [int(automaton.class_of_token[token])]
    for kind in kinds:
        behind = DEAD if kind < 0 else int(automaton.next[state, kind])
        if behind == DEAD:
            continue
        rest = every_path(automaton, weights[1:], behind, left, forced and forced[1:])
        for path, weight in rest:
            yield (kind, *path), weights[0][kind] + weight


def best_path(
    automaton: TokenAutomaton,
    weights: Sequence[Sequence[float]],
    state: int,
    left: int,
    forced: Sequence[int] | None = None,
) -> tuple[tuple[int, ...], float] | None:
    """The path of the largest weight, or None where there is none; as `every_path`."""
    found = every_path(automaton, weights, state, left, forced)
    return max(found, key=lambda pair: pair[1], default=None)
