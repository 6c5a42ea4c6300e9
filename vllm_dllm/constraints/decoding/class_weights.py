"""From logits over a vocabulary to one weight for each token class, as dynamic programming needs.

Only positions that are *wanted* are reduced: those inside a window whose token is not forced. On a
CPU the others cost nothing. On a GPU to know which they are would mean to wait for it, so all
positions are reduced there.

Logarithms of sums are computed to base 2, because on a CPU `exp2` is several times as fast as
`exp`. Each sum has the largest of its terms as its origin, so that no class underflows however far
it is below the rest of its row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vllm_dllm.constraints.decoding.token_classes import CHUNK, BatchClasses

LOG2_E = 1.4426950408889634
# In place of -inf as the origin of a sum, which would give NaN.
LOWEST = -1e38
# A CPU reduces this many rows at a time, which stay in its caches.
ROWS_AT_ONCE_CPU = 4
# How many bytes of logits a GPU gathers at a time.
GATHERED_BYTES_GPU = 1 << 30


@dataclass(frozen=True)
class CanvasLogits:
    """The rows of logits of ``n`` canvases, which are some of a larger batch; no copy.

    Attributes:
        logits: ``[batch, L, ids]``, any floating dtype.
        index: int64 ``[n]``, where the canvases are in the batch.
        on_host: the same numbers.
    """

    logits: torch.Tensor
    index: torch.Tensor
    on_host: Sequence[int] | np.ndarray

    @classmethod
    def every(cls, logits: torch.Tensor) -> CanvasLogits:
        """Of all canvases of a batch, ``[n, L, ids]``."""
        return cls(logits, torch.arange(len(logits), device=logits.device), range(len(logits)))

    def pick(self, token: torch.Tensor) -> torch.Tensor:
        """The logits of tokens int64 ``[n, L, k]``, float32 of this shape.

        A prompt may hold ids of the tokenizer that the model's head does not have. What they get
        is meaningless.
        """
        position = torch.arange(token.shape[1], device=token.device)[:, None]
        token = token.clamp_max(self.logits.shape[2] - 1)
        return self.logits[self.index[:, None, None], position, token].float()

    def logsumexp(self, wanted: torch.Tensor) -> torch.Tensor:
        """The log-sum-exp of whole rows, float32 ``[n, L]``.

        Args:
            wanted: bool ``[n, L]``, the positions that are needed; others may be 0.
        """
        if not may_read(wanted):
            at_once = max(1, GATHERED_BYTES_GPU // (4 * self.logits[0].numel()))
            parts = self.index.split(at_once)
            rows = (self.logits.index_select(0, part).float() for part in parts)
            return torch.cat([some.logsumexp(-1) for some in rows])
        found = torch.zeros(wanted.shape)
        for number, (canvas, some) in enumerate(zip(self.on_host, wanted, strict=True)):
            found[number, some] = self.logits[canvas][some].float().logsumexp(-1)
        return found


@dataclass(frozen=True)
class ClassWeights:
    """What tokens weigh together.

    Attributes:
        by_class: float32 ``[n, L, C + 1]``, -inf for a class without tokens and for no class.
        by_chunk: float32 ``[n, L, T + 1]``, -inf for the last one.
    """

    by_class: torch.Tensor
    by_chunk: torch.Tensor

    @classmethod
    def none(cls, wanted: torch.Tensor, classes: BatchClasses) -> ClassWeights:
        """Of positions that are not reduced, for `wanted` bool ``[n, L]``."""

        def full(size: int) -> torch.Tensor:
            return torch.full((*wanted.shape, size + 1), -torch.inf, device=wanted.device)

        return cls(full(classes.classes), full(classes.chunk_class.shape[1]))


def class_maxima(logits: CanvasLogits, classes: BatchClasses, wanted: torch.Tensor) -> ClassWeights:
    """The largest logit of each class and chunk.

    Args:
        logits: those of ``n`` canvases.
        classes: those of the canvases.
        wanted: bool ``[n, L]``, the positions that are needed.
    """
    found = ClassWeights.none(wanted, classes)
    for part in _parts(classes, wanted):
        top, best = part.maxima(part.gathered(logits).amax(-1))
        part.write(found, best, top)
    return found


def class_logsumexp(
    scaled: CanvasLogits, classes: BatchClasses, wanted: torch.Tensor
) -> ClassWeights:
    """The log-sum-exp of the logits of each class and chunk; arguments as for `class_maxima`."""
    found = ClassWeights.none(wanted, classes)
    for part in _parts(classes, wanted):
        gathered = part.gathered(scaled)
        part.write(found, *part.sums(gathered, gathered.amax(-1)))
    return found


def class_maxima_and_logsumexp(
    logits: CanvasLogits,
    temperature: torch.Tensor,
    classes: BatchClasses,
    wanted: torch.Tensor,
) -> tuple[ClassWeights, ClassWeights]:
    """`class_maxima` of logits, and `class_logsumexp` of logits divided by a temperature.

    Args:
        logits: those of ``n`` canvases.
        temperature: float32 ``[n, L]``, above 0.
        classes: those of the canvases.
        wanted: bool ``[n, L]``, the positions that are needed.
    """
    largest, total = (ClassWeights.none(wanted, classes) for _ in range(2))
    for part in _parts(classes, wanted):
        gathered = part.gathered(logits)
        top, best = part.maxima(gathered.amax(-1))
        part.write(largest, best, top)
        warmth = part.rows(temperature)[..., None]
        part.write(total, *part.sums(gathered.div_(warmth[..., None]), top / warmth))
    return largest, total


@dataclass(frozen=True)
class _Part:
    """Rows of logits that are reduced together: some positions of some canvases.

    Attributes:
        classes: those of all canvases.
        canvases, positions: which rows these are; below, there are ``m * r`` of them.
        chunks: how many chunks these canvases have at most, below ``t``.
    """

    classes: BatchClasses
    canvases: slice
    positions: slice
    chunks: int

    def rows(self, of: torch.Tensor) -> torch.Tensor:
        """The part ``[m, r, ...]`` of a tensor ``[n, L, ...]``."""
        return of[self.canvases, self.positions]

    def gathered(self, of: CanvasLogits) -> torch.Tensor:
        """The logits of all chunks, float32 ``[m, r, t, CHUNK]``; a copy."""
        token = self.classes.token[self.canvases, : self.chunks].flatten(1)[:, None]
        if len(token) == 1:  # `gather` is the fastest there is, and reads one index for all rows
            rows = of.logits[of.on_host[self.canvases][0], self.positions]
            whole = rows.gather(1, token[0].expand(len(rows), -1))[None]
        else:
            length = of.logits.shape[1]
            position = torch.arange(length, device=token.device)[self.positions, None]
            whole = of.logits[of.index[self.canvases, None, None], position, token]
        return whole.float().view(*whole.shape[:2], self.chunks, CHUNK)

    def maxima(self, top: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The maxima of chunks ``[m, r, t]`` without NaN, and those of classes."""
        top = cleaned(top)
        return top, self._largest(top, self._classes_of(top))

    def sums(self, gathered: torch.Tensor, top: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The log-sum-exp of classes and chunks; overwrites the logits.

        Args:
            gathered: float32 ``[m, r, t, CHUNK]``.
            top: ``[m, r, t]``, their maxima.
        """
        origin = top.clamp_min(LOWEST)
        share = gathered.sub_(origin[..., None]).mul_(LOG2_E).exp2_()
        # The sum counts the padding, which is at most 63 copies of the chunk's last token.
        padding = self.classes.padding[self.canvases, None, : self.chunks]
        mass = share.sum(-1).sub_(share[..., -1] * padding)
        by_chunk = cleaned(mass.log_().add_(origin))
        kinds = self._classes_of(by_chunk)
        best = self._largest(by_chunk, kinds).clamp_min_(LOWEST)
        share = (by_chunk - best.gather(2, kinds)).mul_(LOG2_E).exp2_()
        total = torch.zeros_like(best).scatter_add_(2, kinds, share).log_().add_(best)
        total[..., -1].fill_(-torch.inf)
        return total, by_chunk

    def write(self, found: ClassWeights, by_class: torch.Tensor, by_chunk: torch.Tensor) -> None:
        """Write the weights of these rows."""
        self.rows(found.by_class).copy_(by_class)
        self.rows(found.by_chunk)[..., : self.chunks].copy_(by_chunk)

    def _classes_of(self, by_chunk: torch.Tensor) -> torch.Tensor:
        """The class of each entry, int64 ``[m, r, t]``."""
        return self.classes.chunk_class[self.canvases, None, : self.chunks].expand_as(by_chunk)

    def _largest(self, by_chunk: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        best = by_chunk.new_full((*by_chunk.shape[:2], self.classes.classes + 1), -torch.inf)
        best.scatter_reduce_(2, kinds, by_chunk, "amax")
        best[..., -1].fill_(-torch.inf)  # the padding of chunks belongs to no class
        return best


def may_read(wanted: torch.Tensor) -> bool:
    """Whether the values of a tensor can be read without waiting for a device."""
    return wanted.device.type == "cpu"


def _parts(classes: BatchClasses, wanted: torch.Tensor) -> Iterator[_Part]:
    """All rows that are wanted, in parts that fit into the caches, or into a GPU's memory."""
    count, length = wanted.shape
    if not may_read(wanted):
        chunks = max(classes.chunks)
        at_once = max(1, GATHERED_BYTES_GPU // (4 * length * CHUNK * max(1, chunks)))
        for first in range(0, count, at_once):
            yield _Part(classes, slice(first, first + at_once), slice(None), chunks)
        return
    for canvas, wants in enumerate(wanted.tolist()):
        first = 0
        while first < length:
            behind = first
            while behind < min(length, first + ROWS_AT_ONCE_CPU) and wants[behind]:
                behind += 1
            if behind > first:
                rows = slice(canvas, canvas + 1), slice(first, behind)
                yield _Part(classes, *rows, classes.chunks[canvas])
            first = max(behind, first + 1)


def cleaned(x: torch.Tensor) -> torch.Tensor:
    """Without NaN, which compares with nothing."""
    return x.nan_to_num(-torch.inf, torch.inf, -torch.inf)
