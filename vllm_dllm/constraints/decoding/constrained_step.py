"""One decoding step under a constraint: from logits to tokens that lie on one path.

What an engine calls for the canvases of a batch that share an automaton. Whatever a decoding
algorithm then decides, it must decide for these tokens, see `settled`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from vllm_dllm.constraints.decoding.best_path import (
    DeviceAutomaton,
    Paths,
    Window,
    best_paths,
    drawn_paths,
)
from vllm_dllm.constraints.decoding.class_weights import (
    TokenChunks,
    class_best,
    class_sum,
    draw_in_class,
)


@dataclass(frozen=True)
class Chosen:
    """Tokens on a path of each canvas.

    Attributes:
        token: int64 ``[n, L]``. Inside the window a path's; forced tokens are themselves. Behind
            it a token that ends the text; before it what was forced there, or that token.
        logit: float32 ``[n, L]``, the logit of `token` as it came in; 0 outside of the window.
        inside: bool ``[n, L]``, the window.
        states: int64 ``[n, L + 1]``, the automaton's state before each position, and behind the
            last.
        feasible: bool ``[n]``; where false there is no path, and `token` means nothing.
    """

    token: torch.Tensor
    logit: torch.Tensor
    inside: torch.Tensor
    states: torch.Tensor
    feasible: torch.Tensor

    @classmethod
    def nothing(cls, window: Window) -> Chosen:
        """Of canvases, before a path is found for any: nothing is inside."""
        inside = torch.zeros_like(window.forced, dtype=torch.bool)
        states = window.state[:, None].repeat(1, inside.shape[1] + 1)
        logit = torch.zeros_like(window.forced, dtype=torch.float32)
        feasible = torch.ones_like(window.state, dtype=torch.bool)
        return cls(window.forced.clone(), logit, inside, states, feasible)

    def part(self, some: slice) -> Chosen:
        """Views of some canvases, through which they can be written."""
        return Chosen(*(getattr(self, f.name)[some] for f in fields(self)))

    def put(self, index: torch.Tensor, found: Chosen) -> None:
        """Write what was found for the canvases at ``index``, int64 ``[m]``."""
        for f in fields(self):
            getattr(self, f.name).index_copy_(0, index, getattr(found, f.name))


def best_tokens(
    automaton: DeviceAutomaton, chunks: TokenChunks, logits: torch.Tensor, window: Window
) -> Chosen:
    """The tokens of the best paths.

    Args:
        automaton: the constraint of all these canvases.
        chunks: the same automaton's ``class_of_token``.
        logits: ``[n, L, ids]``; their normalisation does not matter.
        window: of ``n`` canvases.
    """
    n, length, ids = logits.shape
    weight, token = class_best(logits.reshape(-1, ids), chunks)
    weight = weight.view(n, length, -1)
    paths = best_paths(automaton, weight, window)
    at = paths.classes.clamp_max(automaton.classes - 1)[..., None]
    return _chosen(
        automaton, logits, window, paths, token.view(n, length, -1).gather(2, at)[..., 0]
    )


def drawn_tokens(
    automaton: DeviceAutomaton,
    chunks: TokenChunks,
    scaled: torch.Tensor,
    window: Window,
    keys: torch.Tensor,
) -> Chosen:
    """Tokens drawn from all that satisfy the constraint, each as likely as the logits make it.

    Args:
        automaton: the constraint of all these canvases.
        chunks: the same automaton's ``class_of_token``.
        scaled: ``[n, L, ids]``, logits over the temperature.
        window: of ``n`` canvases.
        keys: int64 ``[n, L]``, what each position draws with.
    """
    n, length, ids = scaled.shape
    rows = scaled.reshape(-1, ids)
    weight, by_chunk = class_sum(rows, chunks)
    paths = drawn_paths(automaton, weight.view(n, length, -1), window, keys)
    token = draw_in_class(rows, chunks, by_chunk, paths.classes.flatten(), keys.flatten())
    return _chosen(automaton, scaled, window, paths, token.view(n, length))


def _chosen(
    automaton: DeviceAutomaton,
    logits: torch.Tensor,
    window: Window,
    paths: Paths,
    token: torch.Tensor,
) -> Chosen:
    inside = window.inside()
    token = torch.where(inside, token, automaton.end_token)
    # Only the window's own tokens are known to be fixed; those before it are the prompt's.
    position = torch.arange(token.shape[1], device=token.device)
    kept = (window.forced >= 0) & (position < window.end[:, None])
    token = torch.where(kept, window.forced, token)
    logit = logits.gather(2, token[..., None])[..., 0].float()
    return Chosen(token, torch.where(inside, logit, 0.0), inside, paths.states, paths.feasible)


def sureness(chosen: Chosen, total: torch.Tensor) -> torch.Tensor:
    """The model's probability of the path's tokens, float32 ``[n, L]``; 1 outside of the window.

    Args:
        chosen: from `best_tokens` or `drawn_tokens`.
        total: float32 ``[n, L]``, the log-sum-exp of the logits that were given there.
    """
    return torch.where(chosen.inside, (chosen.logit - total).exp(), 1.0)


def settled(
    token: torch.Tensor, masked: torch.Tensor, chosen: Chosen, fixed: torch.Tensor
) -> torch.Tensor:
    """What an algorithm's canvas must be: whatever it decided, with the path's tokens.

    An algorithm may decide for a token of its own, or keep a visible one that the path has left.
    Then tokens of two paths would stand side by side, and might have no completion.

    Args:
        token: int64 ``[n, L]``, the canvas after the algorithm's step.
        masked: bool ``[n, L]``, positions that it left open.
        chosen: this step's path.
        fixed: bool ``[n, L]``, positions that never change.

    Returns:
        int64 ``[n, L]``.
    """
    follows = chosen.inside & ~masked & ~fixed & chosen.feasible[:, None]
    return torch.where(follows, chosen.token, token)
