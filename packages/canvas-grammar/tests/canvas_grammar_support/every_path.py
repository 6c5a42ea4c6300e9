"""Test helper: every path through a small canvas, found by trying them all.

The dynamic programming of `canvas_grammar.decoding.best_path` must agree with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from canvas_grammar.automaton.graph import DEAD
from canvas_grammar.automaton.pushdown import NO_CLASS
from canvas_grammar.automaton.windows import TokenAutomaton

FREE = -1


def target_of_class(automaton: TokenAutomaton) -> np.ndarray:
    """The state after each state and class, or `DEAD`; int64 ``[states, classes]``."""
    found: np.ndarray = np.full((automaton.states, automaton.classes), DEAD, dtype=np.int64)
    edges = zip(automaton.edge_source, automaton.edge_target, automaton.edge_label, strict=True)
    for source, target, label in edges:
        members = automaton.members[automaton.label_first[label] : automaton.label_first[label + 1]]
        found[source, members] = target
    return found


def every_path(
    automaton: TokenAutomaton,
    weights: Sequence[Sequence[float]],
    state: int,
    left: int,
    forced: Sequence[int] | None = None,
    whole: Sequence[float] | None = None,
) -> Iterator[tuple[tuple[int, ...], float]]:
    """The classes of each path, and its weight.

    Args:
        automaton: the constraint.
        weights: of each position of the window, of each class.
        state: before the window.
        left: tokens that may be put out after the window.
        forced: a token for each position, or -1; None for no token.
        whole: what each position weighs after the end of the text; None for what its token weighs.
    """
    target = target_of_class(automaton)
    held = [FREE] * len(weights) if forced is None else forced

    def weight_of(place: int, kind: int, state: int) -> float:
        ended = whole is not None and state == automaton.states - 1
        return whole[place] if ended else weights[place][kind]

    def paths(place: int, state: int) -> Iterator[tuple[tuple[int, ...], float]]:
        if place == len(weights):
            if int(automaton.distance[state]) <= left:
                yield (), 0.0
            return
        kinds = range(automaton.classes)
        if held[place] != FREE:
            kind = int(automaton.class_of_token[held[place]])
            kinds = range(kind, kind + 1) if kind != NO_CLASS else range(0)
        for kind in kinds:
            after = int(target[state, kind])
            if after != DEAD:
                for path, weight in paths(place + 1, after):
                    yield (kind, *path), weight_of(place, kind, state) + weight

    yield from paths(0, state)


def best_path(
    automaton: TokenAutomaton,
    weights: Sequence[Sequence[float]],
    state: int,
    left: int,
    forced: Sequence[int] | None = None,
    whole: Sequence[float] | None = None,
) -> tuple[tuple[int, ...], float] | None:
    """The path of the largest weight, or None where there is none; as `every_path`."""
    found = every_path(automaton, weights, state, left, forced, whole)
    return max(found, key=lambda pair: pair[1], default=None)
