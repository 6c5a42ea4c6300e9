"""Test helper: decoding steps of canvases with automata of their own, from logits or weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from canvas_grammar.automaton.windows import TokenAutomaton
from canvas_grammar.decoding import constrained_step as step
from canvas_grammar.decoding.automaton_batch import AutomatonBatch, OwnEdges
from canvas_grammar.decoding.best_path import (
    CanvasWindow,
    ClassPaths,
    best_paths,
    drawn_paths,
)
from canvas_grammar.decoding.canvas_logits import CanvasLogits
from canvas_grammar.decoding.constrained_step import BatchConstraint, ConstrainedPath
from canvas_grammar.decoding.token_classes import BatchClasses, TokenClasses


def joined(*automata: TokenAutomaton, depth: np.ndarray | None = None) -> BatchConstraint:
    """What canvases follow, an automaton for each; `depth` as in `OwnEdges.from_automaton`."""
    edges = {id(found): OwnEdges.from_automaton(found, depth) for found in automata}
    classes = {
        id(found): TokenClasses.from_class_of_token(found.class_of_token, found.classes)
        for found in automata
    }
    return BatchConstraint(
        AutomatonBatch.union([edges[id(found)] for found in automata], torch.from_numpy),
        BatchClasses.join([classes[id(found)] for found in automata]),
    )


def with_no_class(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Weights ``[L, C + 1]`` of canvases with different numbers of classes, from ``[L, C]``."""
    most = max(one.shape[1] for one in weights) + 1
    return torch.stack(
        [torch.nn.functional.pad(one, (0, most - one.shape[1]), value=9e9) for one in weights]
    )


def best(
    constraint: BatchConstraint,
    weights: torch.Tensor,
    window: CanvasWindow,
    whole: torch.Tensor | None = None,
) -> ClassPaths:
    """`best_paths` for weights ``[n, L, C + 1]``.

    Without `whole`, tokens that end a text weigh behind the end what they weigh elsewhere.
    """
    kind = constraint.kind_of_forced(window)
    whole = torch.full(weights.shape[:2], -torch.inf) if whole is None else whole
    return best_paths(constraint.automata, weights, window, kind, whole)


def drawn(
    constraint: BatchConstraint,
    weights: torch.Tensor,
    window: CanvasWindow,
    keys: torch.Tensor,
    whole: torch.Tensor | None = None,
) -> ClassPaths:
    """`drawn_paths` for weights ``[n, L, C + 1]``; `whole` as for `best`."""
    kind = constraint.kind_of_forced(window)
    whole = torch.full(weights.shape[:2], -torch.inf) if whole is None else whole
    return drawn_paths(constraint.automata, weights, window, kind, whole, keys)


def best_tokens(
    constraint: BatchConstraint, logits: torch.Tensor, window: CanvasWindow
) -> ConstrainedPath:
    """`best_tokens` for logits ``[n, L, ids]``."""
    whole = CanvasLogits.every(logits)
    return step.best_tokens(constraint, whole, window, whole.best(logits.argmax(-1)))


def drawn_tokens(
    constraint: BatchConstraint, scaled: torch.Tensor, window: CanvasWindow, keys: torch.Tensor
) -> ConstrainedPath:
    """`drawn_tokens` for logits ``[n, L, ids]``."""
    whole = CanvasLogits.every(scaled)
    free = whole.drawn(window.wanted(), keys)
    return step.drawn_tokens(constraint, whole, window, free, keys)
