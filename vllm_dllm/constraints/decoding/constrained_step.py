"""One decoding step under a constraint: from logits to tokens that lie on one path.

An engine calls this for the canvases of a batch that share an automaton. Whichever positions a
decoding algorithm then decides, it must decide them for these tokens; `tokens_kept_to_path` makes
sure of that.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from vllm_dllm.constraints.decoding.best_path import (
    CanvasWindow,
    ClassPaths,
    DeviceAutomaton,
    best_paths,
    drawn_paths,
)
from vllm_dllm.constraints.decoding.class_weights import (
    TokenChunks,
    class_logsumexp,
    class_maxima,
    draw_in_class,
)


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
        feasible: bool ``[n]``. Where false there is no path, and `token` is meaningless.
    """

    token: torch.Tensor
    logit: torch.Tensor
    inside: torch.Tensor
    states: torch.Tensor
    feasible: torch.Tensor

    @classmethod
    def empty(cls, window: CanvasWindow) -> ConstrainedPath:
        """For canvases whose paths are not known yet: no position is inside."""
        inside = torch.zeros_like(window.forced, dtype=torch.bool)
        states = window.state[:, None].repeat(1, inside.shape[1] + 1)
        logit = torch.zeros_like(window.forced, dtype=torch.float32)
        feasible = torch.ones_like(window.state, dtype=torch.bool)
        return cls(window.forced.clone(), logit, inside, states, feasible)

    def part(self, canvases: slice) -> ConstrainedPath:
        """Views of a slice of the canvases; writing to them writes to this object."""
        return ConstrainedPath(*(getattr(self, f.name)[canvases] for f in fields(self)))

    def put(self, index: torch.Tensor, path: ConstrainedPath) -> None:
        """Write the path of the canvases at `index`, int64 ``[m]``, in place."""
        for f in fields(self):
            getattr(self, f.name).index_copy_(0, index, getattr(path, f.name))


def best_tokens(
    automaton: DeviceAutomaton, chunks: TokenChunks, logits: torch.Tensor, window: CanvasWindow
) -> ConstrainedPath:
    """The tokens of the best path through each canvas.

    Args:
        automaton: the constraint of all these canvases.
        chunks: of the same automaton's ``class_of_token``.
        logits: ``[n, L, ids]``; they need not be normalized.
        window: of ``n`` canvases.
    """
    n, length, ids = logits.shape
    weight, token = class_maxima(logits.reshape(-1, ids), chunks)
    weight = weight.view(n, length, -1)
    paths = best_paths(automaton, weight, window)
    kind = paths.classes.clamp_max(automaton.classes - 1)[..., None]
    return _with_tokens(
        automaton, logits, window, paths, token.view(n, length, -1).gather(2, kind)[..., 0]
    )


def drawn_tokens(
    automaton: DeviceAutomaton,
    chunks: TokenChunks,
    scaled: torch.Tensor,
    window: CanvasWindow,
    keys: torch.Tensor,
) -> ConstrainedPath:
    """The tokens of a path drawn from all that satisfy the constraint.

    The probability of a path is proportional to the exponential of the sum of its tokens' logits.

    Args:
        automaton: the constraint of all these canvases.
        chunks: of the same automaton's ``class_of_token``.
        scaled: ``[n, L, ids]``, logits divided by the temperature.
        window: of ``n`` canvases.
        keys: int64 ``[n, L]``, the noise key of each position, see `row_keys`.
    """
    n, length, ids = scaled.shape
    rows = scaled.reshape(-1, ids)
    weight, by_chunk = class_logsumexp(rows, chunks)
    paths = drawn_paths(automaton, weight.view(n, length, -1), window, keys)
    token = draw_in_class(rows, chunks, by_chunk, paths.classes.flatten(), keys.flatten())
    return _with_tokens(automaton, scaled, window, paths, token.view(n, length))


def _with_tokens(
    automaton: DeviceAutomaton,
    logits: torch.Tensor,
    window: CanvasWindow,
    paths: ClassPaths,
    token: torch.Tensor,
) -> ConstrainedPath:
    inside = window.inside()
    token = torch.where(inside, token, automaton.end_token)
    # After the window, `forced` is ignored; before it, it holds the tokens of the prompt.
    position = torch.arange(token.shape[1], device=token.device)
    is_forced = (window.forced >= 0) & (position < window.end[:, None])
    token = torch.where(is_forced, window.forced, token)
    logit = logits.gather(2, token[..., None])[..., 0].float()
    return ConstrainedPath(
        token, torch.where(inside, logit, 0.0), inside, paths.states, paths.feasible
    )


def path_probability(path: ConstrainedPath, total: torch.Tensor) -> torch.Tensor:
    """The model's probability of each token of a path, float32 ``[n, L]``; 1 outside the window.

    Args:
        path: from `best_tokens` or `drawn_tokens`.
        total: float32 ``[n, L]``, the log-sum-exp of the logits that were given to that function.
    """
    return torch.where(path.inside, (path.logit - total).exp(), 1.0)


def tokens_kept_to_path(
    token: torch.Tensor, masked: torch.Tensor, path: ConstrainedPath, fixed: torch.Tensor
) -> torch.Tensor:
    """The canvas after a step of an algorithm, with the path's token at every decided position.

    An algorithm may decide a position for another token than the path's, or keep an earlier token
    that is not on this step's path. The canvas would then hold tokens of two paths, and there might
    be no way to complete it.

    Args:
        token: int64 ``[n, L]``, the canvas after the algorithm's step.
        masked: bool ``[n, L]``, positions that are still undecided.
        path: this step's path.
        fixed: bool ``[n, L]``, positions that never change.

    Returns:
        int64 ``[n, L]``.
    """
    follows = path.inside & ~masked & ~fixed & path.feasible[:, None]
    return torch.where(follows, path.token, token)
