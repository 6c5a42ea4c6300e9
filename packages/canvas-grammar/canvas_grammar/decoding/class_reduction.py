"""Reduce some rows of logits over some chunks of tokens, and store the results.

Rows belong to canvas positions. A CPU reduces a few at a time, which stay in its caches; a GPU
reduces those of many canvases, as far as its memory allows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from canvas_grammar.decoding.canvas_logits import GATHERED_BYTES_GPU, CanvasLogits, runs
from canvas_grammar.decoding.log_sums import LOG2_E, LOWEST
from canvas_grammar.decoding.token_classes import CHUNK, BatchClasses

# A CPU reduces this many logits at a time.
LOGITS_AT_ONCE_CPU = 3 << 18


@dataclass(frozen=True)
class ClassWeights:
    """The joint weights of tokens.

    Attributes:
        by_class: float32 ``[n, L, C + 1]``, -inf for a class without tokens and for no class.
        by_chunk: float32 ``[n, L, T + 1]``, -inf for the last one.
    """

    by_class: torch.Tensor
    by_chunk: torch.Tensor

    @classmethod
    def none(cls, wanted: torch.Tensor, classes: BatchClasses) -> ClassWeights:
        """Make the weights of positions that are not reduced, for `wanted` bool ``[n, L]``."""

        def full(size: int) -> torch.Tensor:
            return torch.full((*wanted.shape, size + 1), -torch.inf, device=wanted.device)

        return cls(full(classes.classes), full(classes.chunk_class.shape[1]))

    def put_wide(self, classes: BatchClasses, known: torch.Tensor, weight: torch.Tensor) -> None:
        """Write the weight of the wide class where it is known (bool ``[n, L]``), in place."""
        index = classes.wide.clamp_min(0)[:, None, None].expand(-1, known.shape[1], 1)
        own = self.by_class.gather(2, index)
        put = torch.where(known[..., None], weight[..., None], own)
        self.by_class.scatter_(2, index, put)

    def without_none(self, classes: BatchClasses) -> ClassWeights:
        """The same weights, and -inf for no class, in place."""
        none = torch.arange(self.by_class.shape[2], device=classes.count.device)
        self.by_class.masked_fill_((none >= classes.count[:, None])[:, None], -torch.inf)
        return self


class Scratch:
    """Memory into which a CPU reads row after row; new memory would cost as much again."""

    def __init__(self) -> None:
        self.row = torch.empty(0)
        self.gathered_rows = torch.empty(0)

    def gathered(self, rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Columns ``[k]`` of rows ``[r, ids]``, float32 ``[r, k]``, until the next call.

        Copying a row reads it in order, which is fast, and leaves it in the cache. A gather from
        the row itself would wait for the memory at almost every column.
        """
        if self.row.shape != rows.shape[1:]:
            self.row = torch.empty(rows.shape[1:])
        if self.gathered_rows.numel() < len(rows) * len(index):
            self.gathered_rows = torch.empty(len(rows) * len(index))
        whole = self.gathered_rows[: len(rows) * len(index)].view(len(rows), len(index))
        for row, into in zip(rows, whole, strict=True):
            torch.index_select(self.row.copy_(row), 0, index, out=into)
        return whole


@dataclass(frozen=True)
class LogitsTile:
    """Rows of logits that are reduced together: some positions of some canvases.

    Attributes:
        classes: the classes of all canvases.
        canvases, positions: which rows these are; their number is called ``m * r`` below.
        chunks: which chunks these are; their number is called ``t`` below.
        scratch: memory for a CPU, which reads one canvas at a time, else None.
    """

    classes: BatchClasses
    canvases: slice
    positions: slice
    chunks: slice
    scratch: Scratch | None = None

    def rows(self, of: torch.Tensor) -> torch.Tensor:
        """The part ``[m, r, ...]`` of a tensor ``[n, L, ...]``."""
        return of[self.canvases, self.positions]

    def gathered(self, of: CanvasLogits) -> torch.Tensor:
        """The logits of all chunks, float32 ``[m, r, t, CHUNK]``; a copy, until the next part's."""
        token = self.classes.token[self.canvases, self.chunks].flatten(1)
        if self.scratch is not None:
            rows = of.logits[of.on_host[self.canvases][0], self.positions]
            whole = self.scratch.gathered(rows, token[0])[None]
        else:
            position = torch.arange(of.logits.shape[1], device=token.device)[self.positions, None]
            index = of.index[self.canvases, None, None]
            whole = of.logits[index, position, token[:, None]].float()
        return whole.unflatten(2, (-1, CHUNK))

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
        padding = self.classes.padding[self.canvases, None, self.chunks]
        mass = share.sum(-1).sub_(share[..., -1] * padding)
        by_chunk = cleaned(mass.log_().add_(origin))
        kinds = self._classes_of(by_chunk)
        best = self._largest(by_chunk, kinds).clamp_min_(LOWEST)
        share = (by_chunk - best.gather(2, kinds)).mul_(LOG2_E).exp2_()
        total = torch.zeros_like(best).scatter_add_(2, kinds, share).log_().add_(best)
        return total, by_chunk

    def write(self, found: ClassWeights, by_class: torch.Tensor, by_chunk: torch.Tensor) -> None:
        """Write the weights of these rows."""
        into = self.rows(found.by_class)
        torch.maximum(into, by_class, out=into)  # a class has all its chunks in the same part
        self.rows(found.by_chunk)[..., self.chunks].copy_(by_chunk)

    def _classes_of(self, by_chunk: torch.Tensor) -> torch.Tensor:
        """The class of each entry, int64 ``[m, r, t]``."""
        return self.classes.chunk_class[self.canvases, None, self.chunks].expand_as(by_chunk)

    def _largest(self, by_chunk: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        best = by_chunk.new_full((*by_chunk.shape[:2], self.classes.classes + 1), -torch.inf)
        return best.scatter_reduce_(2, kinds, by_chunk, "amax")


def tiles_of_gpu(classes: BatchClasses, wanted: torch.Tensor) -> Iterator[LogitsTile]:
    """All rows and chunks, in parts that fit into its memory."""
    count, length = wanted.shape
    chunks = max(classes.chunks)
    at_once = max(1, GATHERED_BYTES_GPU // (4 * length * CHUNK * max(1, chunks)))
    for first in range(0, count, at_once):
        yield LogitsTile(classes, slice(first, first + at_once), slice(None), slice(0, chunks))


def tiles_of_cpu(classes: BatchClasses, wanted: torch.Tensor, wide: bool) -> Iterator[LogitsTile]:
    """Rows that are wanted, and the chunks of wide classes or all others, in small parts."""
    scratch = Scratch()
    for canvas, wants in enumerate(wanted.tolist()):
        middle = classes.narrow_chunks[canvas]
        chunks = slice(middle, classes.chunks[canvas]) if wide else slice(0, middle)
        size = (chunks.stop - chunks.start) * CHUNK
        at_once = max(1, LOGITS_AT_ONCE_CPU // size) if size else 0
        for rows in runs(wants, at_once):
            yield LogitsTile(classes, slice(canvas, canvas + 1), rows, chunks, scratch)


def cleaned(x: torch.Tensor) -> torch.Tensor:
    """Replace NaN, which compares with nothing."""
    return x.nan_to_num(-torch.inf, torch.inf, -torch.inf)
