"""Take one decoding step under a constraint: turn logits into tokens that lie on one path.

An engine calls this for the constrained canvases of a batch, whatever their automata are. Whichever
positions a decoding algorithm then decides, it must decide on these tokens;
`ConstrainedPath.keep` ensures that.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from canvas_grammar.decoding.automaton_batch import AutomatonBatch
from canvas_grammar.decoding.best_path import (
    CanvasWindow,
    ClassPaths,
    best_paths,
    drawn_paths,
)
from canvas_grammar.decoding.canvas_logits import CanvasLogits, FreeTokens
from canvas_grammar.decoding.class_reduction import ClassWeights
from canvas_grammar.decoding.class_tokens import best_in_class, draw_in_class
from canvas_grammar.decoding.class_weights import (
    class_logsumexp,
    class_maxima,
    class_maxima_and_logsumexp,
)
from canvas_grammar.decoding.token_classes import BatchClasses


@dataclass
class ConstrainedPath:
    """The tokens of one path through each canvas. Written in place by `put`.

    Attributes:
        token: int64 ``[n, L]``. Inside the window, the tokens of the path, forced ones included.
            After the window, a token that ends the text. Before the window, the token that is
            forced there, or else the one that ends the text.
        logit: float32 ``[n, L]``, the logit of `token` as it was given; 0 outside the window.
        inside: bool ``[n, L]``, which positions are in the window.
        states: int64 ``[n, L + 1]``, the automaton's state before each position, and after the
            last.
        feasible: bool ``[n]``. If false, there is no path, and `token` is meaningless.
    """

    token: torch.Tensor
    logit: torch.Tensor
    inside: torch.Tensor
    states: torch.Tensor
    feasible: torch.Tensor

    @classmethod
    def empty(cls, window: CanvasWindow) -> ConstrainedPath:
        """Make one for canvases whose paths are not known yet, with no position inside."""
        inside = torch.zeros_like(window.forced, dtype=torch.bool)
        states = window.state[:, None].repeat(1, inside.shape[1] + 1)
        logit = torch.zeros_like(window.forced, dtype=torch.float32)
        feasible = torch.ones_like(window.state, dtype=torch.bool)
        return cls(window.forced.clone(), logit, inside, states, feasible)

    def keep(self, token: torch.Tensor, masked: torch.Tensor, fixed: torch.Tensor) -> torch.Tensor:
        """The canvas after a step of an algorithm, with the path's token where it is decided.

        An algorithm may decide a position for another token than the path's, or keep an earlier
        token that is not on this step's path. The canvas would then hold tokens of two paths, and
        there might be no way to complete it.

        Args:
            token: int64 ``[n, L]``, the canvas after the algorithm's step.
            masked: bool ``[n, L]``, positions that are still undecided.
            fixed: bool ``[n, L]``, positions that never change.

        Returns:
            int64 ``[n, L]``.
        """
        follows = self.inside & ~masked & ~fixed & self.feasible[:, None]
        return torch.where(follows, self.token, token)

    def part(self, canvases: slice) -> ConstrainedPath:
        """Views of a slice of the canvases; writing to them writes to this object."""
        return ConstrainedPath(*(getattr(self, f.name)[canvases] for f in fields(self)))

    def put(self, index: torch.Tensor, path: ConstrainedPath) -> None:
        """Write the path of the canvases at `index`, int64 ``[m]``, in place."""
        for f in fields(self):
            getattr(self, f.name).index_copy_(0, index, getattr(path, f.name))


@dataclass(frozen=True)
class BatchConstraint:
    """What each of the ``n`` canvases of a batch must follow, which may differ between canvases.

    Attributes:
        automata: the union of their automata.
        classes: the classes of tokens that these automata read.
    """

    automata: AutomatonBatch
    classes: BatchClasses

    def kind_of_forced(self, window: CanvasWindow) -> torch.Tensor:
        """The class of each forced token, int64 ``[n, L]``; C if it has none or is not forced."""
        kind = self.classes.of_tokens(window.forced)
        return torch.where(window.forced >= 0, kind, self.classes.classes)

    def behind_end(self, path: ConstrainedPath) -> torch.Tensor:
        """Positions of the window after the token that ends the text, bool ``[n, L]``."""
        state = self.automata.number[path.states[:, :-1] + self.automata.first_state[:, None]]
        return path.inside & (self.automata.distance[state] == 0)


def best_tokens(
    constraint: BatchConstraint, logits: CanvasLogits, window: CanvasWindow, free: FreeTokens
) -> ConstrainedPath:
    """The tokens of the best path through each canvas.

    If the text of the likeliest tokens of all, up to the first one that ends a text, satisfies the
    constraint, then these are the path's.

    Args:
        constraint: of the ``n`` canvases.
        logits: of the canvases; they need not be normalized.
        window: of the canvases.
        free: the tokens of the largest logits, allowed or not; the lowest ids where logits tie.
    """
    weights = class_maxima(logits, constraint.classes, window.wanted(), free)
    return _best(constraint, weights, logits, window, free)


def drawn_tokens(
    constraint: BatchConstraint,
    scaled: CanvasLogits,
    window: CanvasWindow,
    free: FreeTokens,
    keys: torch.Tensor,
) -> ConstrainedPath:
    """The tokens of a path drawn from all that satisfy the constraint.

    The probability of a path is proportional to the exponential of the sum of its tokens' logits,
    up to the token that ends the text. So it equals the probability of the path's text if canvases
    were drawn without a constraint repeatedly until one has an allowed text.

    Args:
        constraint: of the ``n`` canvases.
        scaled: logits of the canvases, divided by the temperature.
        window: of the canvases.
        free: tokens drawn from the same logits by `draw`, with the same keys.
        keys: int64 ``[n, L]``, the noise key of each position, see `row_keys`.
    """
    weights = class_logsumexp(scaled, constraint.classes, window.wanted(), free)
    return _drawn(constraint, weights, scaled, window, free, keys)


def best_and_drawn_tokens(
    constraint: BatchConstraint,
    logits: CanvasLogits,
    temperature: torch.Tensor,
    window: CanvasWindow,
    free: tuple[FreeTokens, FreeTokens],
    keys: torch.Tensor,
) -> tuple[ConstrainedPath, ConstrainedPath]:
    """`best_tokens` of logits, and `drawn_tokens` of logits divided by a temperature.

    Both read the logits once. The drawn path's `logit` is not divided.

    Args:
        constraint: of the ``n`` canvases.
        logits: of the canvases; they need not be normalized.
        temperature: float32 ``[n, L]``, above 0.
        window: of the canvases.
        free: as for `best_tokens`, from the logits, and as for `drawn_tokens`, from the divided
            ones.
        keys: int64 ``[n, L]``, the noise key of each position, see `row_keys`.
    """
    largest, total = class_maxima_and_logsumexp(
        logits, temperature, constraint.classes, window.wanted(), free
    )
    best = _best(constraint, largest, logits, window, free[0])
    return best, _drawn(constraint, total, logits, window, free[1], keys, temperature)


def _best(
    constraint: BatchConstraint,
    weights: ClassWeights,
    logits: CanvasLogits,
    window: CanvasWindow,
    free: FreeTokens,
) -> ConstrainedPath:
    kind = constraint.kind_of_forced(window)
    paths = best_paths(constraint.automata, weights.by_class, window, kind, free.weight)
    token = best_in_class(logits, constraint.classes, weights.by_chunk, paths.classes)
    token = _free_or(token, free, constraint, paths)
    return _with_tokens(constraint, logits, window, paths, token)


def _drawn(
    constraint: BatchConstraint,
    weights: ClassWeights,
    logits: CanvasLogits,
    window: CanvasWindow,
    free: FreeTokens,
    keys: torch.Tensor,
    temperature: torch.Tensor | None = None,
) -> ConstrainedPath:
    kind = constraint.kind_of_forced(window)
    paths = drawn_paths(constraint.automata, weights.by_class, window, kind, free.weight, keys)
    token = draw_in_class(
        logits, constraint.classes, weights.by_chunk, paths.classes, keys, temperature
    )
    token = _free_or(token, free, constraint, paths)
    return _with_tokens(constraint, logits, window, paths, token)


def _free_or(
    token: torch.Tensor, free: FreeTokens, constraint: BatchConstraint, paths: ClassPaths
) -> torch.Tensor:
    """The free tokens that are in the path's classes, and elsewhere other tokens of these classes.

    The best token of all is also the best of its class. A token drawn from all tokens has, given
    its class, the probability of one drawn from this class, because the path does not depend on it.
    """
    fits = constraint.classes.of_tokens(free.token) == paths.classes
    return torch.where(fits, free.token, token)


def _with_tokens(
    constraint: BatchConstraint,
    logits: CanvasLogits,
    window: CanvasWindow,
    paths: ClassPaths,
    token: torch.Tensor,
) -> ConstrainedPath:
    inside = window.inside()
    token = torch.where(inside, token, constraint.classes.end_token[:, None])
    # After the window, `forced` is ignored; before it, it holds the tokens of the prompt.
    position = torch.arange(token.shape[1], device=token.device)
    is_forced = (window.forced >= 0) & (position < window.end[:, None])
    token = torch.where(is_forced, window.forced, token)
    logit = logits.pick(token[..., None])[..., 0]
    return ConstrainedPath(
        token, torch.where(inside, logit, 0.0), inside, paths.states, paths.feasible
    )


def path_probability(
    path: ConstrainedPath, top: torch.Tensor, probability: torch.Tensor
) -> torch.Tensor:
    """The model's probability of each token of a path, float32 ``[n, L]``; 1 outside the window.

    Args:
        path: from `best_tokens` or `drawn_tokens`.
        top: float32 ``[n, L]``, the logit of some token at each position, for example the largest;
            from the logits that were given to that function.
        probability: float32 ``[n, L]``, the model's probability of the same token.
    """
    return torch.where(path.inside, (path.logit - top).exp() * probability, 1.0)
