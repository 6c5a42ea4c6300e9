"""Row statistics as Triton kernels, which pass over the vocabulary one tile of logits at a time.

The logits are in memory (`LogitRows`), or they are computed from hidden states and the head and
live in registers only. The sums of products are float32. As in a model's own head, they are rounded
to the head's dtype and then soft-capped in float32, so logits that tie there also tie here; the
lowest id wins.

`rows_kernel` has a grid of (row tiles, splits of the vocabulary). Each program folds its tiles into
a few numbers for each row (`fold`). `merge_kernel` merges the splits and draws a token, which needs
the logits of the drawn group a second time: only rows in memory are drawn from.

All numbers of a group of 64 ids are relative to the group's own maximum. A group's score therefore
does not depend on tiles, splits or other rows, and neither does a sample, except where two scores
tie within rounding.
"""

# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from canvas_grammar.decoding.noise_triton import gumbel, split_key

from vllm_dllm.ops.device import multiprocessors
from vllm_dllm.ops.statistics.head import Head
from vllm_dllm.ops.statistics.partials import SoftmaxPartials
from vllm_dllm.ops.statistics.rows import GROUP
from vllm_dllm.ops.statistics.sampled import FIRST_GROUP_INDEX
from vllm_dllm.ops.statistics.scores_triton import LogitRows, capped, empty, read_scores

# A merge reads the states of all splits of a row at once. It is compiled for the most of them, and
# what is not there costs nothing.
MAX_SPLITS = 512
# Two to a power below this is 0 in float32. Exponents are clamped to it, because 0 * -inf would be
# NaN in the sums.
LEAST_EXPONENT = tl.constexpr(-160.0)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
_GROUP = tl.constexpr(GROUP)
_FIRST_GROUP_INDEX = tl.constexpr(FIRST_GROUP_INDEX)


@dataclass(frozen=True)
class Tile:
    """How a pass over the vocabulary is divided among programs."""

    # Rows, token ids and summed products of a tile; powers of two, ids at least `GROUP`, and all at
    # least 16 if there are products.
    rows: int
    ids: int
    depth: int
    warps: int  # warps of a program
    stages: int  # stages of its software pipeline
    resident: int  # programs that are meant to share a multiprocessor
    merged_rows: int = 1  # rows of a program that merges and draws


# For an H100 or H200 (132 multiprocessors with 227 KiB of shared memory and 65,536 registers).
# Up to 32 rows, reading the head dominates the time, so many bytes are kept in flight, and mma.sync
# multiplies. From 64 rows on, wgmma multiplies. Twice as many ids would halve the traffic of hidden
# states from the L2 cache, but folding so wide a tile spills registers.
NARROW = Tile(rows=16, ids=128, depth=128, warps=4, stages=3, resident=2)
SLIM = Tile(rows=32, ids=128, depth=128, warps=4, stages=3, resident=2)
MIDDLE = Tile(rows=64, ids=128, depth=64, warps=4, stages=4, resident=2)
WIDE = Tile(rows=128, ids=128, depth=64, warps=8, stages=4, resident=1)
# Float32 is multiplied by plain fused multiply-adds, which need more registers.
FLOAT32 = Tile(rows=32, ids=64, depth=32, warps=4, stages=3, resident=3)
IN_MEMORY = Tile(rows=1, ids=4096, depth=16, warps=4, stages=3, resident=4)


# So many rows fill each of the tiles.
TILE_ROWS = (16, 32, 64, 128)


def tile_for(rows: int, dtype: torch.dtype) -> Tile:
    """The tile for that many rows of hidden states of that dtype."""
    if dtype == torch.float32:
        return FLOAT32
    if rows <= 32:
        return NARROW if rows <= 16 else SLIM
    return MIDDLE if rows <= 64 else WIDE


def logits_statistics(
    rows: LogitRows,
    forbidden: int | None = None,
    temperature: torch.Tensor | None = None,
    keys: torch.Tensor | None = None,
    first_id: int = 0,
    tile: Tile = IN_MEMORY,
) -> SoftmaxPartials:
    """The results of one pass over rows of logits in memory.

    At least one token of a row must be left. Without keys and temperatures,
    `SoftmaxPartials.greedy_statistics` makes of them what `rows.row_statistics` computes, up to
    float32 rounding, because sums run in another order.

    Args:
        rows: at least one row.
        forbidden: id that is never chosen or drawn but takes part in the normalisation, or None.
        temperature: float32 ``[rows]``, at least 0; None for 1 in all rows.
        keys: int64 ``[rows]``, see `noise.keyed.row_keys`; with None nothing is drawn, and the
            sample is the argmax.
        first_id: the id of the first column, on a rank that has a part of the ids.
        tile: how to divide the work.

    Raises:
        ValueError: the ids of a row are not contiguous.
    """
    count, ids = rows.logits.shape
    if not ids:
        return SoftmaxPartials.empty(count, rows.logits.device)
    numbered = range(first_id, first_id + ids)
    return _statistics(
        (None, rows.arguments), rows.logits, numbered, temperature, keys, forbidden, tile
    )


def head_statistics(
    hidden: torch.Tensor, head: Head, forbidden: int | None = None, tile: Tile | None = None
) -> SoftmaxPartials:
    """The partial results of one pass over this rank's part of the head, without logits in memory.

    `SoftmaxPartials.merge_ranks` merges those of all ranks. Ids are those of the whole vocabulary.

    Args:
        hidden: ``[rows, hidden]``, at least one row, of the dtype of the head's weight.
        head: the head; only its `weight`, `soft_cap` and ids are read.
        forbidden: as for `logits_statistics`.
        tile: how to divide the work, or None for `tile_for`.

    Raises:
        ValueError: the head has no weight, or one of another dtype or width than `hidden`, or the
            rows of either are not contiguous.
    """
    weight, cap = head.weight, None if head.soft_cap is None else float(head.soft_cap)
    if weight is None:
        raise ValueError("this head has no weight, which fused statistics multiply with")
    if weight.dtype != hidden.dtype or weight.shape[1] != hidden.shape[1]:
        raise ValueError(
            f"hidden states are {hidden.dtype} of width {hidden.shape[1]}, the head's weight is "
            f"{weight.dtype} of width {weight.shape[1]}"
        )
    if hidden.stride(1) != 1 or weight.stride(1) != 1:
        raise ValueError("hidden states and the head's weight must have contiguous rows")
    if not len(head.ids):
        return SoftmaxPartials.empty(len(hidden), hidden.device)
    of_product = hidden, hidden.stride(0), weight, weight.stride(0), hidden.shape[1], cap
    tile = tile or tile_for(len(hidden), hidden.dtype)
    return _statistics((of_product, None), hidden, head.ids, None, None, forbidden, tile)


def drawn_by_kernels(
    rows: LogitRows, temperature: torch.Tensor, keys: torch.Tensor, forbidden: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A token drawn from each row, and its `sampled.drawn_weight`, ``[rows]`` both.

    What is excluded is never drawn, but it must not be the likeliest token. Scores are divided by
    `temperature` (float32 ``[rows]``) where it is not 0. The forbidden id is never drawn.
    """
    found = logits_statistics(rows, forbidden, temperature, keys)
    return found.sample, (found.scaled - found.best).exp()


def _statistics(
    source: tuple[tuple[Any, ...] | None, tuple[Any, ...] | None],
    of_rows: torch.Tensor,
    ids: range,
    temperature: torch.Tensor | None,
    keys: torch.Tensor | None,
    forbidden: int | None,
    tile: Tile,
) -> SoftmaxPartials:
    """Launch both kernels.

    `source` are the arguments of `product` or of `read_scores`, `of_rows` has a row for each row,
    and `ids` are this rank's.
    """
    rows, device = len(of_rows), of_rows.device
    row_tiles, id_tiles = triton.cdiv(rows, tile.rows), triton.cdiv(len(ids), tile.ids)
    barred = -1 if forbidden is None or forbidden not in ids else ids.index(forbidden)
    share = tiles_per_split(row_tiles, id_tiles, tile.resident * multiprocessors(device))
    splits = triton.cdiv(id_tiles, share)
    common = (
        *source,
        None if temperature is None else temperature.float().contiguous(),
        None if keys is None else keys.contiguous(),
        empty((4, splits, rows), torch.float32, device),
        empty((2, splits, rows), torch.int32, device),
        empty((rows,), torch.float32, device),
        *(rows, ids.start, len(ids), barred),
    )
    even = source[0] is None or source[0][4] % tile.depth == 0
    rows_kernel[row_tiles, splits](
        *common, share, ROWS=tile.rows, IDS=tile.ids, DEPTH=tile.depth, EVEN=even,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    numbers, tokens = empty((6, rows), torch.float32, device), empty((2, rows), torch.int64, device)
    merge_kernel[(triton.cdiv(rows, tile.merged_rows),)](
        *common, splits, numbers, tokens, ROWS=tile.merged_rows, SPLITS=MAX_SPLITS, num_warps=4
    )
    best, origin, drawn, scaled, total, weighted = numbers
    token, sample = tokens
    return SoftmaxPartials(best, token, origin, drawn, sample, scaled, total, weighted)


@cache
def tiles_per_split(row_tiles: int, id_tiles: int, at_once: int) -> int:
    """Tiles that one program should go through, if the device runs `at_once` programs at a time.

    This considers up to four waves of programs and picks the number that minimises the longest time
    through all tiles. A program costs about half a tile more than its tiles.
    """
    best, least = id_tiles, float("inf")
    for waves in range(1, 5):
        splits = min(max(1, waves * at_once // row_tiles), MAX_SPLITS)
        share = triton.cdiv(id_tiles, splits)
        cost = triton.cdiv(row_tiles * triton.cdiv(id_tiles, share), at_once) * (share + 0.5)
        if cost < least:
            best, least = share, cost
    return best


@triton.jit
def inverse_temperature(temperature, row):  # type: ignore[no-untyped-def]
    """1 / temperature of some rows, 1 for greedy ones."""
    inverse = tl.full(row.shape, 1.0, tl.float32)
    if temperature is not None:
        value = tl.load(temperature + row)
        inverse = 1.0 / tl.where(value > 0, value, 1.0)
    return inverse


@triton.jit
def fold(  # type: ignore[no-untyped-def]
    x, first, inverse, low, high, best, token, total, weighted, drawn, group, DRAWS: tl.constexpr
):
    """Fold a tile of logits into the running state of its rows.

    `x` is float32 ``[rows, groups, 64]``, from id `first` on, and -inf for ids that may not be
    chosen. `low` and `high` are the halves of the rows' keys, `inverse` is 1 / temperature.

    The state has the parts that `rows_kernel` stores, each ``[rows]``: the largest logit `best` and
    its id `token`, the sums `total` and `weighted`, the drawn group's score `drawn` and its first
    id `group`.
    """
    rate = inverse * LOG2_E
    # Of each group, [rows, groups]: the largest logit and its place, and the sums relative to it.
    top, top_place = tl.max(x, 2, return_indices=True)
    is_empty = top == float("-inf")
    distance = (x - tl.where(is_empty, 0.0, top)[:, :, None]) * rate[:, None, None]
    distance = tl.maximum(distance, LEAST_EXPONENT)
    weight = tl.exp2(distance)
    group_total, group_weighted = tl.sum(weight, 2), tl.sum(weight * distance, 2)
    group_index = tl.arange(0, x.shape[1])[None, :]
    if DRAWS:
        noise_index = _FIRST_GROUP_INDEX + first + group_index * _GROUP
        score = tl.log(tl.where(is_empty, 1.0, group_total)) + top * inverse[:, None]
        score += gumbel(low[:, None], high[:, None], noise_index)
        highest, winner = tl.max(score, 1, return_indices=True)
        group = tl.where(highest > drawn, first + winner * _GROUP, group)
        drawn = tl.maximum(drawn, highest)
    largest, winner = tl.max(top, 1, return_indices=True)
    inside = tl.sum(tl.where(group_index == winner[:, None], top_place, 0), 1)
    # The earlier tile wins ties.
    token = tl.where(largest > best, first + winner * _GROUP + inside, token)
    best_before, best = best, tl.maximum(best, largest)
    # Make the sums so far and those of the groups relative to the new maximum.
    origin = tl.where(best == float("-inf"), 0.0, best)
    moved = tl.maximum((best_before - origin) * rate, LEAST_EXPONENT)
    moved = tl.where(best_before == float("-inf"), 0.0, moved)
    shift = tl.maximum((top - origin[:, None]) * rate[:, None], LEAST_EXPONENT)
    factor = tl.exp2(shift)
    keep = tl.exp2(moved)
    added = tl.sum(factor * (group_weighted + group_total * shift), 1)
    weighted = keep * (weighted + total * moved) + added
    total = keep * total + tl.sum(factor * group_total, 1)
    return best, token, total, weighted, drawn, group


@triton.jit
def merge_splits(  # type: ignore[no-untyped-def]
    numbers, ids, forbidden_logit, row, rows, splits, inverse, forbidden, SPLITS: tl.constexpr
):
    """Merge the states of all splits of some rows.

    Returns, each ``[rows]``: the largest logit that may be chosen and its id; the origin, which is
    the largest of all logits; the two sums of `SoftmaxPartials` relative to the origin; the drawn
    group's score and its first id.
    """
    split = tl.arange(0, SPLITS)[None, :]
    step = splits.to(tl.int64) * rows
    offset = split.to(tl.int64) * rows + row[:, None]
    ok = split < splits
    top = tl.load(numbers + offset, mask=ok, other=float("-inf"))  # [rows, splits]
    split_total = tl.load(numbers + offset + step, mask=ok, other=0.0)
    split_weighted = tl.load(numbers + offset + 2 * step, mask=ok, other=0.0) * LN_2
    score = tl.load(numbers + offset + 3 * step, mask=ok, other=float("-inf"))
    best, of_best = tl.max(top, 1, return_indices=True)
    drawn, of_drawn = tl.max(score, 1, return_indices=True)
    tokens = tl.load(ids + offset, mask=ok, other=0)
    token = tl.sum(tl.where(split == of_best[:, None], tokens, 0), 1)
    groups = tl.load(ids + offset + step, mask=ok, other=0)
    group = tl.sum(tl.where(split == of_drawn[:, None], groups, 0), 1)
    is_forbidden = row * 0 + forbidden >= 0
    barred = tl.load(forbidden_logit + row, mask=is_forbidden, other=float("-inf"))
    origin = tl.maximum(best, barred)
    base = tl.where(origin == float("-inf"), 0.0, origin)
    shift = tl.maximum((top - base[:, None]) * inverse[:, None], LEAST_EXPONENT)
    factor = tl.exp(shift)
    of_barred = tl.maximum((barred - base) * inverse, LEAST_EXPONENT)
    total = tl.sum(factor * split_total, 1) + tl.exp(of_barred)
    weighted = tl.sum(factor * (split_weighted + split_total * shift), 1)
    weighted += tl.exp(of_barred) * of_barred
    return best, token, origin, total, weighted, drawn, group


@triton.jit
def draw_in_group(x, group, inverse, low, high):  # type: ignore[no-untyped-def]
    """An id drawn by the logits ``[rows, 64]`` of each row's group, and its scaled logit."""
    inside = tl.arange(0, _GROUP)[None, :]
    scaled = x * inverse[:, None]
    noisy = scaled + gumbel(low[:, None], high[:, None], group[:, None] + inside)
    place = tl.argmax(noisy, 1)
    chosen = tl.sum(tl.where(inside == place[:, None], scaled, 0.0), 1)
    return group + place, chosen


@triton.jit
def product(  # type: ignore[no-untyped-def]
    hidden, hidden_stride, weight, weight_stride, width, cap, row, head_row,
    EVEN: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Logits, float32 ``[rows, ids]``, of some rows of hidden states and some rows of the head."""
    step = tl.arange(0, DEPTH)
    x_at = hidden + row.to(tl.int64)[:, None] * hidden_stride + step[None, :]
    w_at = weight + head_row.to(tl.int64)[None, :] * weight_stride + step[:, None]
    logits = tl.zeros((row.shape[0], head_row.shape[0]), tl.float32)
    for start in range(0, width, DEPTH):
        if EVEN:
            x, w = tl.load(x_at), tl.load(w_at)
        else:
            x = tl.load(x_at, mask=(start + step < width)[None, :], other=0.0)
            w = tl.load(w_at, mask=(start + step < width)[:, None], other=0.0)
        logits = tl.dot(x, w, logits, input_precision="ieee")
        x_at += DEPTH
        w_at += DEPTH
    return capped(logits.to(weight.dtype.element_ty).to(tl.float32), cap)


@triton.jit(do_not_specialize=["rows", "first_id", "count", "forbidden", "tiles_per_split"])
def rows_kernel(  # type: ignore[no-untyped-def]
    of_product, of_scores, temperature, keys,
    numbers, ids, forbidden_logit, rows, first_id, count, forbidden, tiles_per_split,
    ROWS: tl.constexpr, IDS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Pass over some tiles of the vocabulary for some rows; the grid is (row tiles, splits).

    Row tiles vary fastest, so that programs that run at the same time read the same part of the
    head. The rank's ids are `first_id` and the `count - 1` that follow; `forbidden` is counted from
    the first one, and is -1 if there is none among them. The logits are those of `product`, or of
    `read_scores` if `of_product` is None. What a split leaves for the merge:

    - `numbers`, float32 ``[4, splits, rows]``: the largest logit, the sum of 2^d and the sum of
      d * 2^d with d = log2(e) * (logit - largest) / temperature, and the drawn group's score;
    - `ids`, int32 ``[2, splits, rows]``: the id of the largest logit, the drawn group's first id;
    - `forbidden_logit`, float32 ``[rows]``: the forbidden id's logit, if there is such an id.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    near = tl.minimum(row, rows - 1)  # rows after the last one are computed but not stored
    inverse = inverse_temperature(temperature, near)
    low, high = near.to(tl.uint32), near.to(tl.uint32)
    if keys is not None:
        low, high = split_key(tl.load(keys + near))
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    drawn = tl.full((ROWS,), float("-inf"), tl.float32)
    total, weighted = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
    token, group = tl.full((ROWS,), first_id, tl.int32), tl.full((ROWS,), first_id, tl.int32)
    start = tl.program_id(1) * tiles_per_split * IDS
    for begin in range(start, tl.minimum(start + tiles_per_split * IDS, count), IDS):
        local = begin + tl.arange(0, IDS)  # this rank's ids, counted from 0
        allowed = local != forbidden
        if of_product is None:
            logits, stride, cap, added, changes, floor, length = of_scores
            x = read_scores(
                logits, stride, cap, added, changes, floor, length, near, local[None, :], count
            )  # fmt: skip
        else:
            hidden, hidden_stride, weight, weight_stride, width, cap = of_product
            x = product(
                hidden, hidden_stride, weight, weight_stride, width, cap,
                near, tl.minimum(local, count - 1), EVEN, DEPTH,
            )  # fmt: skip
            allowed &= local < count
        if (forbidden >= begin) & (forbidden < begin + IDS):
            is_forbidden = (local == forbidden)[None, :]
            store_at = forbidden_logit + row[:, None] + tl.zeros_like(local)[None, :]
            tl.store(store_at, x, mask=is_forbidden & (row < rows)[:, None])
        x = tl.where(allowed[None, :], x, float("-inf"))
        best, token, total, weighted, drawn, group = fold(
            tl.reshape(x, (ROWS, IDS // _GROUP, _GROUP)), first_id + begin, inverse, low, high,
            best, token, total, weighted, drawn, group, keys is not None,
        )  # fmt: skip
    ok = row < rows
    place = tl.program_id(1).to(tl.int64) * rows + row
    step = tl.num_programs(1).to(tl.int64) * rows
    tl.store(numbers + place, best, mask=ok)
    tl.store(numbers + place + step, total, mask=ok)
    tl.store(numbers + place + 2 * step, weighted, mask=ok)
    tl.store(numbers + place + 3 * step, drawn, mask=ok)
    tl.store(ids + place, token, mask=ok)
    tl.store(ids + place + step, group, mask=ok)


@triton.jit(do_not_specialize=["rows", "first_id", "count", "forbidden", "splits"])
def merge_kernel(  # type: ignore[no-untyped-def]
    of_product, of_scores, temperature, keys,
    numbers, ids, forbidden_logit, rows, first_id, count, forbidden, splits, out, out_ids,
    ROWS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Merge the splits of some rows, and draw within the drawn group; the grid is (row tiles,).

    The results are the fields of `SoftmaxPartials`: float32 `out` ``[6, rows]``, int64 `out_ids`
    ``[2, rows]``.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    near = tl.minimum(row, rows - 1)
    inverse = inverse_temperature(temperature, near)
    best, token, origin, total, weighted, drawn, group = merge_splits(
        numbers, ids, forbidden_logit, near, rows, splits, inverse, forbidden, SPLITS
    )
    best *= inverse
    sample, scaled = token, best
    if keys is not None:
        low, high = split_key(tl.load(keys + near))
        local = group[:, None] - first_id + tl.arange(0, _GROUP)[None, :]
        logits, stride, cap, added, changes, floor, length = of_scores
        x = read_scores(logits, stride, cap, added, changes, floor, length, near, local, count)
        x = tl.where(local == forbidden, float("-inf"), x)
        sample, scaled = draw_in_group(x, group, inverse, low, high)
    ok = row < rows
    tl.store(out + row, best, mask=ok)
    tl.store(out + rows + row, origin * inverse, mask=ok)
    tl.store(out + 2 * rows + row, drawn, mask=ok)
    tl.store(out + 3 * rows + row, scaled, mask=ok)
    tl.store(out + 4 * rows + row, total, mask=ok)
    tl.store(out + 5 * rows + row, weighted, mask=ok)
    tl.store(out_ids + row, token.to(tl.int64), mask=ok)
    tl.store(out_ids + rows + row, sample.to(tl.int64), mask=ok)
