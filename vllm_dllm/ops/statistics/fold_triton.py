"""Folding logits into a few numbers a row: what both kernels of row statistics are made of.

`row_stats_triton` (materialised logits) and `head_stats_triton` (tiles of the head) pass over the
vocabulary with a grid of (row tiles, splits of the vocabulary). Each program folds its tiles into
a running state and leaves that as `Partial`; a second kernel merges the splits, draws within the
drawn group and writes the fields of `Found`.

All that is said of a group of 64 ids is relative to the group's own maximum, so a score does not
depend on tiles, splits or neighbours, and neither does a sample (apart from scores that tie
within rounding).
"""

# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
import triton
import triton.language as tl

from vllm_dllm.ops.device import multiprocessors
from vllm_dllm.ops.noise.keyed_triton import gumbel
from vllm_dllm.ops.statistics.partials import Found
from vllm_dllm.ops.statistics.sampled import FIRST_GROUP_INDEX, GROUP, SampledStatistics

# A merge reads all partial results of a row at once.
MAX_SPLITS = 512
# Exponents of two below this give 0 in float32; clamping keeps 0 * inf out of the sums.
NOTHING = tl.constexpr(-160.0)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
_GROUP = tl.constexpr(GROUP)
_FIRST_GROUP_INDEX = tl.constexpr(FIRST_GROUP_INDEX)


@dataclass
class MeasuredStatistics(SampledStatistics):
    """`SampledStatistics` with ``log_sum_exp``, float32, of the row's logits over temperature.

    Of a row at temperature 0 that is the log-sum-exp of the logits as they are.
    """

    log_sum_exp: torch.Tensor


def measured(found: Found, greedy: torch.Tensor) -> MeasuredStatistics:
    """Statistics of what was found; `greedy` as for `Found.statistics`."""
    fields = vars(found.statistics(greedy))
    return MeasuredStatistics(**fields, log_sum_exp=found.origin + found.sum.log())


@dataclass(frozen=True)
class Partial:
    """What each split of the vocabulary leaves for the merge.

    Attributes:
        numbers: float32 ``[4, splits, rows]``: the largest logit, the sum of 2^d and of d * 2^d
            with d = log2(e) * (logit - largest) / temperature, and the drawn group's score.
        picks: int32 ``[2, splits, rows]``: the id of the largest, the drawn group's first id.
        forbidden: float32 ``[rows]``, the forbidden id's logit, where there is one.
    """

    numbers: torch.Tensor
    picks: torch.Tensor
    forbidden: torch.Tensor

    @classmethod
    def empty(cls, splits: int, rows: int, device: torch.device) -> Partial:
        """Not written to yet."""
        return cls(
            empty((4, splits, rows), torch.float32, device),
            empty((2, splits, rows), torch.int32, device),
            empty((rows,), torch.float32, device),
        )

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """All of them, as the kernels take them."""
        return self.numbers, self.picks, self.forbidden


class Cut(Protocol):
    """What a tile of the logits says: its rows and ids, and how many programs share a place."""

    @property
    def rows(self) -> int:
        """Rows of a tile."""

    @property
    def ids(self) -> int:
        """Ids of a tile."""

    @property
    def resident(self) -> int:
        """Programs that are meant to share a multiprocessor."""


@dataclass(frozen=True)
class Pass:
    """One pass over ``[rows, count]`` logits: grid, tiles of a split, and what it leaves."""

    grid: tuple[int, int]
    share: int
    partial: Partial

    @classmethod
    def plan(cls, rows: int, count: int, tile: Cut, device: torch.device) -> Pass:
        """With enough splits of the vocabulary to keep the device busy."""
        row_tiles, tiles = triton.cdiv(rows, tile.rows), triton.cdiv(count, tile.ids)
        share = tiles_per_split(row_tiles, tiles, tile.resident * multiprocessors(device))
        splits = triton.cdiv(tiles, share)
        return cls((row_tiles, splits), share, Partial.empty(splits, rows, device))


def per_row(
    instead: torch.Tensor, temperature: torch.Tensor | None, keys: torch.Tensor | None
) -> tuple[tuple[torch.Tensor, torch.Tensor], dict[str, bool]]:
    """Temperature and keys as kernels take them, and the constants that say which there are.

    Where there are none, the kernel gets `instead` and does not read it.
    """
    tensors = (
        instead if temperature is None else temperature.float().contiguous(),
        instead if keys is None else keys.contiguous(),
    )
    return tensors, {"TEMPERED": temperature is not None, "NOISE": keys is not None}


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Every tensor that a kernel writes comes from here, so that tests can fill it before."""
    return torch.empty(tuple(shape), dtype=dtype, device=device)


def outputs(rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """What a merge writes, see `finish`: float32 ``[6, rows]``, int64 ``[2, rows]``."""
    return empty((6, rows), torch.float32, device), empty((2, rows), torch.int64, device)


def as_found(numbers: torch.Tensor, picks: torch.Tensor, soft: torch.Tensor) -> Found:
    """What a merge wrote, with a soft embedding ``[rows, hidden]`` relative to the origin."""
    best, origin, drawn, scaled, total, weighted = numbers
    token, sample = picks
    return Found(best, token, origin, drawn, sample, scaled, total, weighted, soft)


@cache
def tiles_per_split(row_tiles: int, tiles: int, slots: int) -> int:
    """Tiles that one program should go through.

    Of up to four waves of programs, the number whose longest way through all tiles is the
    shortest; a program costs about as much as half a tile beyond its tiles.

    Args:
        row_tiles: tiles along the rows.
        tiles: tiles along the vocabulary.
        slots: programs that run at a time.
    """
    best, least = tiles, float("inf")
    for waves in range(1, 5):
        splits = min(max(1, waves * slots // row_tiles), MAX_SPLITS)
        share = triton.cdiv(tiles, splits)
        cost = triton.cdiv(row_tiles * triton.cdiv(tiles, share), slots) * (share + 0.5)
        if cost < least:
            best, least = share, cost
    return best


def read_at_once(splits: int) -> int:
    """A power of two for a merge of that many splits; few different ones, each is compiled."""
    return max(16, int(triton.next_power_of_2(splits)))


@triton.jit
def one_over(temperature, row, TEMPERED: tl.constexpr):  # type: ignore[no-untyped-def]
    """1 / temperature of some rows, 1 for greedy ones."""
    if TEMPERED:
        value = tl.load(temperature + row)
        inverse = 1.0 / tl.where(value > 0, value, 1.0)
    else:
        inverse = tl.full(row.shape, 1.0, tl.float32)
    return inverse


@triton.jit
def fold(  # type: ignore[no-untyped-def]
    x, first, inverse, low, high, best, token, total, weighted, drawn, group, NOISE: tl.constexpr
):
    """A tile's logits, float32 ``[rows, groups, 64]`` from id `first` on, into the running state.

    The state, each ``[rows]``, is what `Partial` says of a split. Ids that may not be chosen are
    -inf in `x`. `low` and `high` are halves of keys, `inverse` is 1 / temperature.
    """
    rate = inverse * LOG2_E
    top, at = tl.max(x, 2, return_indices=True)  # [rows, groups]
    is_empty = top == float("-inf")
    d = tl.maximum((x - tl.where(is_empty, 0.0, top)[:, :, None]) * rate[:, None, None], NOTHING)
    e = tl.exp2(d)
    mass, lean = tl.sum(e, 2), tl.sum(e * d, 2)
    of_group = tl.arange(0, x.shape[1])[None, :]
    if NOISE:
        name = _FIRST_GROUP_INDEX + first + of_group * _GROUP
        score = tl.log(tl.where(is_empty, 1.0, mass)) + top * inverse[:, None]
        score += gumbel(low[:, None], high[:, None], name)
        leader, which = tl.max(score, 1, return_indices=True)
        group = tl.where(leader > drawn, first + which * _GROUP, group)
        drawn = tl.maximum(drawn, leader)
    largest, which = tl.max(top, 1, return_indices=True)
    inside = tl.sum(tl.where(of_group == which[:, None], at, 0), 1)
    # Ties stay with the tile before.
    token = tl.where(largest > best, first + which * _GROUP + inside, token)
    before, best = best, tl.maximum(best, largest)
    origin = tl.where(best == float("-inf"), 0.0, best)
    moved = tl.where(before == float("-inf"), 0.0, tl.maximum((before - origin) * rate, NOTHING))
    shift = tl.maximum((top - origin[:, None]) * rate[:, None], NOTHING)
    factor = tl.exp2(shift)
    keep = tl.exp2(moved)
    weighted = keep * (weighted + total * moved) + tl.sum(factor * (lean + mass * shift), 1)
    total = keep * total + tl.sum(factor * mass, 1)
    return best, token, total, weighted, drawn, group


@triton.jit
def leave(  # type: ignore[no-untyped-def]
    numbers, picks, row, rows, best, token, total, weighted, drawn, group
):
    """Write the state of this program's split, `Partial`, for rows below `rows`."""
    split, splits = tl.program_id(1), tl.num_programs(1)
    step = splits.to(tl.int64) * rows
    at = numbers + split.to(tl.int64) * rows + row
    ok = row < rows
    tl.store(at, best, mask=ok)
    tl.store(at + step, total, mask=ok)
    tl.store(at + 2 * step, weighted, mask=ok)
    tl.store(at + 3 * step, drawn, mask=ok)
    at = picks + split.to(tl.int64) * rows + row
    tl.store(at, token, mask=ok)
    tl.store(at + step, group, mask=ok)


@triton.jit
def merge(  # type: ignore[no-untyped-def]
    numbers, picks, of_forbidden, row, rows, splits, inverse, forbidden, SPLITS: tl.constexpr
):
    """The splits' states of rows ``[rows]`` together.

    Returns the largest logit that may be chosen and its id, the origin (the largest of all), the
    sums of `Found` relative to that, the drawn group's score and its first id.
    """
    s = tl.arange(0, SPLITS)[None, :]
    step = splits.to(tl.int64) * rows
    at = s.to(tl.int64) * rows + row[:, None]
    ok = s < splits
    top = tl.load(numbers + at, mask=ok, other=float("-inf"))  # [rows, splits]
    mass = tl.load(numbers + at + step, mask=ok, other=0.0)
    lean = tl.load(numbers + at + 2 * step, mask=ok, other=0.0) * LN_2
    score = tl.load(numbers + at + 3 * step, mask=ok, other=float("-inf"))
    best, which = tl.max(top, 1, return_indices=True)
    drawn, ahead = tl.max(score, 1, return_indices=True)
    ids = tl.load(picks + at, mask=ok, other=0)
    token = tl.sum(tl.where(s == which[:, None], ids, 0), 1)
    ids = tl.load(picks + at + step, mask=ok, other=0)
    group = tl.sum(tl.where(s == ahead[:, None], ids, 0), 1)
    barred = tl.load(of_forbidden + row, mask=row * 0 + forbidden >= 0, other=float("-inf"))
    origin = tl.maximum(best, barred)
    base = tl.where(origin == float("-inf"), 0.0, origin)
    shift = tl.maximum((top - base[:, None]) * inverse[:, None], NOTHING)
    factor = tl.exp(shift)
    own = tl.maximum((barred - base) * inverse, NOTHING)
    total = tl.sum(factor * mass, 1) + tl.exp(own)
    weighted = tl.sum(factor * (lean + mass * shift), 1) + tl.exp(own) * own
    return best, token, origin, total, weighted, drawn, group


@triton.jit
def finish(  # type: ignore[no-untyped-def]
    out, ids, row, rows, best, token, origin, total, weighted, drawn, sample, scaled
):
    """Write `Found`: six numbers and two ids of each row, those that are scaled as such."""
    ok = row < rows
    tl.store(out + row, best, mask=ok)
    tl.store(out + rows + row, origin, mask=ok)
    tl.store(out + 2 * rows + row, drawn, mask=ok)
    # The drawn logit is computed anew and may differ in its last bits; it is never the larger.
    tl.store(out + 3 * rows + row, tl.minimum(scaled, best), mask=ok)
    tl.store(out + 4 * rows + row, total, mask=ok)
    tl.store(out + 5 * rows + row, weighted, mask=ok)
    tl.store(ids + row, token.to(tl.int64), mask=ok)
    tl.store(ids + rows + row, sample.to(tl.int64), mask=ok)


@triton.jit
def pick(x, group, inverse, low, high):  # type: ignore[no-untyped-def]
    """An id of each row's group by its logits ``[rows, 64]``, and its scaled logit."""
    inside = tl.arange(0, _GROUP)[None, :]
    scaled = x * inverse[:, None]
    noisy = scaled + gumbel(low[:, None], high[:, None], group[:, None] + inside)
    at = tl.argmax(noisy, 1)
    chosen = tl.sum(tl.where(inside == at[:, None], scaled, 0.0), 1)
    return group + at, chosen
