"""Launching a pass over the vocabulary: the shared code of the row-statistics launchers.

`rows_triton` (logits in memory) and `head_triton` (tiles of the head) launch a grid of (row tiles,
splits of the vocabulary). Each program leaves the state of its split in `SplitStates`; a second
kernel merges the splits, draws a token and writes the fields of `SoftmaxPartials`. `fold_triton`
has the functions from which both kernels are built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
import triton

from vllm_dllm.ops.device import multiprocessors
from vllm_dllm.ops.statistics.partials import SoftmaxPartials
from vllm_dllm.ops.statistics.sampled import SampledStatistics

# A merge reads the states of all splits of a row at once.
MAX_SPLITS = 512


@dataclass
class MeasuredStatistics(SampledStatistics):
    """`SampledStatistics` with the log-sum-exp of each row.

    Attributes:
        log_sum_exp: float32, of the row's logits over temperature; for a row at temperature 0, of
            the unscaled logits.
    """

    log_sum_exp: torch.Tensor


def measured(partials: SoftmaxPartials, greedy: torch.Tensor) -> MeasuredStatistics:
    """Compute statistics from `partials`; `greedy` is as for `SoftmaxPartials.statistics`."""
    fields = vars(partials.statistics(greedy))
    return MeasuredStatistics(**fields, log_sum_exp=partials.origin + partials.sum.log())


@dataclass(frozen=True)
class SplitStates:
    """The state that each split of the vocabulary leaves for the merge.

    Attributes:
        numbers: float32 ``[4, splits, rows]``: the largest logit, the sum of 2^d and the sum of
            d * 2^d with d = log2(e) * (logit - largest) / temperature, and the drawn group's score.
        ids: int32 ``[2, splits, rows]``: the id of the largest logit, the drawn group's first id.
        forbidden_logit: float32 ``[rows]``, the forbidden id's logit, if there is such an id.
    """

    numbers: torch.Tensor
    ids: torch.Tensor
    forbidden_logit: torch.Tensor

    @classmethod
    def empty(cls, splits: int, rows: int, device: torch.device) -> SplitStates:
        """Allocate states that have not been written yet."""
        return cls(
            empty((4, splits, rows), torch.float32, device),
            empty((2, splits, rows), torch.int32, device),
            empty((rows,), torch.float32, device),
        )

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """All three tensors, in the order that the kernels expect."""
        return self.numbers, self.ids, self.forbidden_logit


class LogitsTile(Protocol):
    """The size of a tile of logits, and how many programs share a multiprocessor."""

    @property
    def rows(self) -> int:
        """Rows of a tile."""

    @property
    def ids(self) -> int:
        """Token ids of a tile."""

    @property
    def resident(self) -> int:
        """Programs that are meant to share a multiprocessor."""


@dataclass(frozen=True)
class VocabularyPass:
    """One pass over ``[rows, ids]`` logits.

    Attributes:
        grid: row tiles, splits of the vocabulary.
        tiles_per_split: tiles that one program goes through.
        states: the states that the programs leave.
    """

    grid: tuple[int, int]
    tiles_per_split: int
    states: SplitStates

    @classmethod
    def plan(cls, rows: int, ids: int, tile: LogitsTile, device: torch.device) -> VocabularyPass:
        """A pass with enough splits of the vocabulary to keep the device busy."""
        row_tiles, id_tiles = triton.cdiv(rows, tile.rows), triton.cdiv(ids, tile.ids)
        at_once = tile.resident * multiprocessors(device)
        share = tiles_per_split(row_tiles, id_tiles, at_once)
        splits = triton.cdiv(id_tiles, share)
        return cls((row_tiles, splits), share, SplitStates.empty(splits, rows, device))


def row_arguments(
    placeholder: torch.Tensor, temperature: torch.Tensor | None, keys: torch.Tensor | None
) -> tuple[tuple[torch.Tensor, torch.Tensor], dict[str, bool]]:
    """Temperature and keys as kernels take them, and the constants that say which of them exist.

    In place of None the kernel gets `placeholder`, which it does not read.
    """
    tensors = (
        placeholder if temperature is None else temperature.float().contiguous(),
        placeholder if keys is None else keys.contiguous(),
    )
    return tensors, {"TEMPERED": temperature is not None, "NOISE": keys is not None}


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate a tensor that a kernel writes; tests replace this to fill it with garbage."""
    return torch.empty(tuple(shape), dtype=dtype, device=device)


def outputs(rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The tensors of `store_partials`: float32 ``[6, rows]`` and int64 ``[2, rows]``."""
    return empty((6, rows), torch.float32, device), empty((2, rows), torch.int64, device)


def as_partials(numbers: torch.Tensor, ids: torch.Tensor, soft: torch.Tensor) -> SoftmaxPartials:
    """`outputs` as `SoftmaxPartials`; `soft` ``[rows, hidden]`` is relative to the origin."""
    best, origin, drawn, scaled, total, weighted = numbers
    token, sample = ids
    return SoftmaxPartials(best, token, origin, drawn, sample, scaled, total, weighted, soft)


@cache
def tiles_per_split(row_tiles: int, id_tiles: int, at_once: int) -> int:
    """Tiles that one program should go through.

    This considers up to four waves of programs and picks the number that minimises the longest time
    through all tiles. A program costs about half a tile more than its tiles.

    Args:
        row_tiles: tiles along the rows.
        id_tiles: tiles along the vocabulary.
        at_once: programs that the device runs at a time.
    """
    best, least = id_tiles, float("inf")
    for waves in range(1, 5):
        splits = min(max(1, waves * at_once // row_tiles), MAX_SPLITS)
        share = triton.cdiv(id_tiles, splits)
        cost = triton.cdiv(row_tiles * triton.cdiv(id_tiles, share), at_once) * (share + 0.5)
        if cost < least:
            best, least = share, cost
    return best


def merge_width(splits: int) -> int:
    """Splits that a merge reads at once: a power of two, at least 16.

    A merge is compiled for each width, so there are few different ones.
    """
    return max(16, int(triton.next_power_of_2(splits)))
