"""Access the logits of constrained canvases, and what would be chosen without a constraint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from canvas_grammar.decoding.log_sums import logsumexp
from canvas_grammar.decoding.noise import gumbel

# Maps scaled logits float32 [rows, ids] and keys int64 [rows] to a token drawn from the softmax of
# each row, int64 [rows], and the log-sum-exp of the row, float32 [rows].
Draw = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
# A CPU reads this many rows at a time, which stay in its caches.
ROWS_AT_ONCE_CPU = 4
# How many bytes of logits a GPU gathers at a time.
GATHERED_BYTES_GPU = 1 << 30


def draw_rows(scaled: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The simplest `Draw`, with noise for every id; an engine may have a faster one."""
    noise = gumbel(keys, torch.arange(scaled.shape[1], device=scaled.device))
    return (scaled + noise).argmax(-1), logsumexp(scaled)


@dataclass(frozen=True)
class FreeTokens:
    """What the positions of ``n`` canvases would hold if there were no constraint.

    Attributes:
        token: int64 ``[n, L]``, the most probable tokens, or drawn ones.
        weight: float32 ``[n, L]``, the largest logit, or the log-sum-exp of all logits.
    """

    token: torch.Tensor
    weight: torch.Tensor


@dataclass(frozen=True)
class CanvasLogits:
    """The rows of logits of ``n`` canvases, which belong to a larger batch; they are not copied.

    Attributes:
        logits: ``[batch, L, ids]``, any floating dtype.
        index: int64 ``[n]``, where the canvases are in the batch.
        on_host: the same numbers on the host.
    """

    logits: torch.Tensor
    index: torch.Tensor
    on_host: Sequence[int] | np.ndarray

    @classmethod
    def every(cls, logits: torch.Tensor) -> CanvasLogits:
        """Make one from the logits of all canvases of a batch, ``[n, L, ids]``."""
        return cls(logits, torch.arange(len(logits), device=logits.device), range(len(logits)))

    def pick(self, token: torch.Tensor) -> torch.Tensor:
        """The logits of tokens int64 ``[n, L, k]``, float32 of this shape.

        A prompt may hold ids of the tokenizer that the model's head does not have. Their results
        are meaningless.
        """
        position = torch.arange(token.shape[1], device=token.device)[:, None]
        token = token.clamp_max(self.logits.shape[2] - 1)
        return self.logits[self.index[:, None, None], position, token].float()

    def best(self, token: torch.Tensor) -> FreeTokens:
        """Make the free tokens from the tokens of the largest logits, int64 ``[n, L]``."""
        return FreeTokens(token, self.pick(token[..., None])[..., 0])

    def drawn(self, wanted: torch.Tensor, keys: torch.Tensor, draw: Draw = draw_rows) -> FreeTokens:
        """Draw tokens from the softmax of whole rows.

        Args:
            wanted: bool ``[n, L]``, the positions that are needed; others may be 0.
            keys: int64 ``[n, L]``, the noise key of each position, see `row_keys`.
            draw: draws a token from each row. If it uses `gumbel` with the same keys, it may use
                only indices below `class_tokens.FIRST_RANGE_INDEX`.
        """
        if may_read(wanted):
            token, total = torch.zeros_like(keys), torch.zeros(wanted.shape)
            for number, wants in enumerate(wanted.tolist()):
                for some in runs(wants, ROWS_AT_ONCE_CPU):
                    rows = self.logits[self.on_host[number], some].float()
                    drawn = draw(rows, keys[number, some])
                    token[number, some], total[number, some] = drawn
            return FreeTokens(token, total)
        at_once = max(1, GATHERED_BYTES_GPU // (4 * self.logits[0].numel()))
        found = [
            draw(self.logits.index_select(0, part).flatten(0, 1).float(), key.flatten())
            for part, key in zip(self.index.split(at_once), keys.split(at_once), strict=True)
        ]
        token, total = (torch.cat(parts).view(keys.shape) for parts in zip(*found, strict=True))
        return FreeTokens(token, total)


def may_read(wanted: torch.Tensor) -> bool:
    """Whether the values of a tensor can be read without waiting for a device."""
    return wanted.device.type == "cpu"


def runs(wants: list[bool], most: int) -> Iterator[slice]:
    """Slices of adjacent wanted positions, at most `most` at a time; none if that is 0."""
    first = 0
    while most and first < len(wants):
        behind = first
        while behind < min(len(wants), first + most) and wants[behind]:
            behind += 1
        if behind > first:
            yield slice(first, behind)
        first = max(behind, first + 1)
