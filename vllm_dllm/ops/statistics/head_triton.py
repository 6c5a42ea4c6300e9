"""Row statistics over tiles of the head, as Triton kernels: logits live in registers only.

The grid is (row tiles, splits of the vocabulary). Each program multiplies its hidden states by one
tile of the head at a time, and folds the tile's logits into a few numbers per row
(`fold_triton.fold`). A second kernel merges the splits and draws a token: for that it computes the
64 logits of the drawn group a second time, from 64 rows of the head for each row of hidden states.

The sums of products are float32. As in a model's own head, they are rounded to the head's dtype and
then soft-capped in float32, so logits that tie there also tie here; the lowest id wins a tie.
"""

# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from vllm_dllm.ops.noise.keyed_triton import split_keys
from vllm_dllm.ops.statistics.fold_triton import (
    fold,
    inverse_temperature,
    merge_splits,
    sample_in_group,
    store_partials,
    store_split,
)
from vllm_dllm.ops.statistics.head import Head
from vllm_dllm.ops.statistics.launch_triton import (
    VocabularyPass,
    as_partials,
    merge_width,
    outputs,
    row_arguments,
)
from vllm_dllm.ops.statistics.partials import SoftmaxPartials
from vllm_dllm.ops.statistics.sampled import GROUP

_GROUP = tl.constexpr(GROUP)


@dataclass(frozen=True)
class HeadTile:
    """How the product with the head is divided among programs.

    Attributes:
        rows, ids, depth: rows, token ids and summed products of a tile; powers of two, at least 16,
            ids at least `GROUP`.
        warps: warps of a program.
        stages: stages of its software pipeline.
        resident: programs that are meant to share a multiprocessor.
        draw_rows: rows of a program that merges and draws.
    """

    rows: int
    ids: int
    depth: int
    warps: int
    stages: int
    resident: int
    draw_rows: int = 1


# For an H100 or H200 (132 multiprocessors with 227 KiB of shared memory and 65,536 registers).
# Up to 32 rows, reading the head dominates the time, so many bytes are kept in flight, and mma.sync
# multiplies. From 64 rows on, wgmma multiplies. Twice as many ids would halve the traffic of hidden
# states from the L2 cache, but folding so wide a tile spills registers.
NARROW = HeadTile(rows=16, ids=128, depth=128, warps=4, stages=3, resident=2)
SLIM = HeadTile(rows=32, ids=128, depth=128, warps=4, stages=3, resident=2)
MIDDLE = HeadTile(rows=64, ids=128, depth=64, warps=4, stages=4, resident=2)
WIDE = HeadTile(rows=128, ids=128, depth=64, warps=8, stages=4, resident=1)
# Float32 is multiplied by plain fused multiply-adds, which need more registers.
FLOAT32 = HeadTile(rows=32, ids=64, depth=32, warps=4, stages=3, resident=3)


def tile_for(rows: int, dtype: torch.dtype) -> HeadTile:
    """The tile for that many rows of that dtype."""
    if dtype == torch.float32:
        return FLOAT32
    if rows <= 32:
        return NARROW if rows <= 16 else SLIM
    return MIDDLE if rows <= 64 else WIDE


def head_statistics(
    hidden: torch.Tensor,
    head: Head,
    temperature: torch.Tensor | None = None,
    keys: torch.Tensor | None = None,
    forbidden: int | None = None,
    tile: HeadTile | None = None,
) -> SoftmaxPartials:
    """The partial results of one pass over this rank's part of the head; `soft` is empty.

    `SoftmaxPartials.merge_ranks` merges those of all ranks, and `launch_triton.measured` makes
    statistics of them. Ids are those of the whole vocabulary. Arguments mean the same as for
    `rows_triton.measured_statistics`.

    Args:
        hidden: ``[rows, hidden]``, at least one row, of the dtype of the head's weight.
        head: the head; only its `weight`, `soft_cap` and ids are read.
        temperature: float32 ``[rows]`` or None.
        keys: int64 ``[rows]`` or None.
        forbidden: id that is never chosen, or None.
        tile: how to divide the work, or None for `tile_for`.

    Raises:
        ValueError: the head has no weight, or one of another dtype or width than `hidden`.
    """
    weight = checked_weight(hidden, head)
    tile = tile or tile_for(len(hidden), hidden.dtype)
    rows, device, ids = len(hidden), hidden.device, head.ids
    soft = hidden.new_zeros((rows, 0), dtype=torch.float32)
    if not len(ids):
        return _empty_partials(rows, device, soft)
    vocabulary_pass = VocabularyPass.plan(rows, len(ids), tile, device)
    tensors, flags = row_arguments(hidden, temperature, keys)
    common = (*product_arguments(hidden, weight, head), *tensors, *vocabulary_pass.states.tensors)
    excluded = -1 if forbidden is None else forbidden
    common += (rows, ids.start, len(ids), excluded)
    flags |= product_constants(hidden, head, tile)
    sizes = {"ROWS": tile.rows, "IDS": tile.ids}
    sizes |= {"num_warps": tile.warps, "num_stages": tile.stages}
    head_kernel[vocabulary_pass.grid](*common, vocabulary_pass.tiles_per_split, **sizes, **flags)
    splits = vocabulary_pass.grid[1]
    numbers, token_ids = outputs(rows, device)
    sizes = {"ROWS": tile.draw_rows, "SPLITS": merge_width(splits), "num_warps": 4}
    grid = (triton.cdiv(rows, tile.draw_rows),)
    head_draw_kernel[grid](*common, splits, numbers, token_ids, **sizes, **flags)
    return as_partials(numbers, token_ids, soft)


def checked_weight(hidden: torch.Tensor, head: Head) -> torch.Tensor:
    """The head's weight.

    Raises:
        ValueError: the kernels cannot multiply these hidden states with it.
    """
    if head.weight is None:
        raise ValueError("this head has no weight, which fused statistics multiply with")
    if head.weight.dtype != hidden.dtype or head.weight.shape[1] != hidden.shape[1]:
        raise ValueError(
            f"hidden states are {hidden.dtype} of width {hidden.shape[1]}, the head's weight is "
            f"{head.weight.dtype} of width {head.weight.shape[1]}"
        )
    if hidden.stride(1) != 1 or head.weight.stride(1) != 1:
        raise ValueError("hidden states and the head's weight must have contiguous rows")
    return head.weight


def product_arguments(hidden: torch.Tensor, weight: torch.Tensor, head: Head) -> tuple[Any, ...]:
    """The arguments of `product`, as the kernels take them."""
    cap = 0.0 if head.soft_cap is None else float(head.soft_cap)
    return hidden, hidden.stride(0), weight, weight.stride(0), hidden.shape[1], cap


def product_constants(hidden: torch.Tensor, head: Head, tile: HeadTile) -> dict[str, Any]:
    """The constants of `product`, as the kernels take them."""
    even = hidden.shape[1] % tile.depth == 0
    return {"CAPPED": head.soft_cap is not None, "EVEN": even, "DEPTH": tile.depth}


def _empty_partials(rows: int, device: torch.device, soft: torch.Tensor) -> SoftmaxPartials:
    """The partial results of a rank whose part of the head is all padding."""
    none = torch.full((rows,), -torch.inf, device=device)
    zero, first = none.new_zeros(rows), torch.zeros(rows, dtype=torch.int64, device=device)
    return SoftmaxPartials(none, first, none, none, first, none, zero, zero, soft)


@triton.jit
def capped(x, cap):  # type: ignore[no-untyped-def]
    """``cap * tanh(x / cap)``, off by at most ``2e-7 * cap``."""
    # Triton has no tanh. If the exponential overflows, the quotient is 0, which is right.
    return cap - (2.0 * cap) / (tl.exp(x * (2.0 / cap)) + 1.0)


@triton.jit
def product(  # type: ignore[no-untyped-def]
    hidden, hidden_stride, weight, weight_stride, width, cap, row, head_row,
    CAPPED: tl.constexpr, EVEN: tl.constexpr, DEPTH: tl.constexpr,
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
    logits = logits.to(weight.dtype.element_ty).to(tl.float32)
    if CAPPED:
        logits = capped(logits, cap)
    return logits


@triton.jit(do_not_specialize=["rows", "first_id", "count", "forbidden", "tiles_per_split"])
def head_kernel(  # type: ignore[no-untyped-def]
    hidden, hidden_stride, weight, weight_stride, width, cap, temperature, keys,
    numbers, ids, forbidden_logit, rows, first_id, count, forbidden, tiles_per_split,
    ROWS: tl.constexpr, IDS: tl.constexpr, DEPTH: tl.constexpr,
    TEMPERED: tl.constexpr, NOISE: tl.constexpr, CAPPED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Pass over some tiles of the head for some rows; the grid is (row tiles, splits).

    Row tiles vary fastest, so that programs that run at the same time read the same part of the
    head. The rank's ids are `first_id` and the `count - 1` that follow.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    near = tl.minimum(row, rows - 1)  # rows after the last one are computed but not stored
    inverse = inverse_temperature(temperature, near, TEMPERED)
    low, high = near.to(tl.uint32), near.to(tl.uint32)
    if NOISE:
        low, high = split_keys(tl.load(keys + near))
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    drawn = tl.full((ROWS,), float("-inf"), tl.float32)
    total, weighted = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
    token, group = tl.full((ROWS,), first_id, tl.int32), tl.full((ROWS,), first_id, tl.int32)
    start = tl.program_id(1) * tiles_per_split * IDS
    for begin in range(start, tl.minimum(start + tiles_per_split * IDS, count), IDS):
        local = begin + tl.arange(0, IDS)  # this rank's ids, counted from 0
        x = product(
            hidden, hidden_stride, weight, weight_stride, width, cap,
            near, tl.minimum(local, count - 1), CAPPED, EVEN, DEPTH,
        )  # fmt: skip
        first = first_id + begin
        if (forbidden >= first) & (forbidden < first + IDS):
            is_forbidden = (local + first_id == forbidden)[None, :]
            store_at = forbidden_logit + row[:, None] + tl.zeros_like(local)[None, :]
            tl.store(store_at, x, mask=is_forbidden & (row < rows)[:, None])
        allowed = (local < count) & (local + first_id != forbidden)
        x = tl.where(allowed[None, :], x, float("-inf"))
        best, token, total, weighted, drawn, group = fold(
            tl.reshape(x, (ROWS, IDS // _GROUP, _GROUP)), first, inverse, low, high,
            best, token, total, weighted, drawn, group, NOISE,
        )  # fmt: skip
    store_split(numbers, ids, row, rows, best, token, total, weighted, drawn, group)


@triton.jit(do_not_specialize=["rows", "first_id", "count", "forbidden", "splits"])
def head_draw_kernel(  # type: ignore[no-untyped-def]
    hidden, hidden_stride, weight, weight_stride, width, cap, temperature, keys,
    numbers, ids, forbidden_logit, rows, first_id, count, forbidden, splits, out, out_ids,
    ROWS: tl.constexpr, SPLITS: tl.constexpr, DEPTH: tl.constexpr,
    TEMPERED: tl.constexpr, NOISE: tl.constexpr, CAPPED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Merge the splits of some rows, and draw within the drawn group; the grid is (row tiles,)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    near = tl.minimum(row, rows - 1)
    inverse = inverse_temperature(temperature, near, TEMPERED)
    best, token, origin, total, weighted, drawn, group = merge_splits(
        numbers, ids, forbidden_logit, near, rows, splits, inverse, forbidden, SPLITS
    )
    sample, scaled = token, best * inverse
    if NOISE:
        low, high = split_keys(tl.load(keys + near))
        local = group[:, None] - first_id + tl.arange(0, _GROUP)[None, :]
        step = tl.arange(0, DEPTH)
        x_at = hidden + near.to(tl.int64)[:, None] * hidden_stride + step[None, :]
        head_row = tl.minimum(local, count - 1).to(tl.int64)
        w_at = weight + (head_row * weight_stride)[:, :, None] + step[None, None, :]
        products = tl.zeros((ROWS, _GROUP, DEPTH), tl.float32)
        for start in range(0, width, DEPTH):
            ok = start + step < width
            x = tl.load(x_at + start, mask=ok[None, :], other=0.0).to(tl.float32)
            w = tl.load(w_at + start, mask=ok[None, None, :], other=0.0).to(tl.float32)
            products += x[:, None, :] * w
        logits = tl.sum(products, 2).to(weight.dtype.element_ty).to(tl.float32)
        if CAPPED:
            logits = capped(logits, cap)
        allowed = (local < count) & (local + first_id != forbidden)
        logits = tl.where(allowed, logits, float("-inf"))
        sample, scaled = sample_in_group(logits, group, inverse, low, high)
    store_partials(
        out, out_ids, row, rows, best * inverse, token, origin * inverse, total, weighted, drawn,
        sample, scaled,
    )  # fmt: skip
