"""Row statistics over tiles of the head, as Triton kernels: logits live in registers only.

A grid of (row tiles, splits of the vocabulary): each program multiplies its hidden states with
one tile of the head after the other, and folds the tile's logits into a few numbers a row
(`fold_triton.fold`). A second kernel merges the splits and draws: it computes the 64 logits
of the drawn group anew, 64 rows of the head for one row of hidden states.

The logits are float32 sums of products, never rounded to the head's dtype. A model's own head
rounds them to bfloat16 before its soft cap: there logits tie, or swap, that differ here.
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
    Pass,
    as_found,
    finish,
    fold,
    leave,
    merge,
    one_over,
    outputs,
    per_row,
    pick,
    read_at_once,
)
from vllm_dllm.ops.statistics.head import Head
from vllm_dllm.ops.statistics.partials import Found
from vllm_dllm.ops.statistics.sampled import GROUP

_GROUP = tl.constexpr(GROUP)


@dataclass(frozen=True)
class HeadTile:
    """How a product with the head is cut.

    Attributes:
        rows, ids, depth: of a product's tile; powers of two, at least 16, ids at least `GROUP`.
        warps, stages: of a program, and of its pipeline.
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
# Up to 32 rows the head's bytes are the cost: many bytes in flight, products of mma.sync. From 64
# rows on a tile is wgmma's. Twice as many ids would halve the traffic of hidden states from the L2
# cache, but folding so wide a tile spills registers.
NARROW = HeadTile(rows=16, ids=128, depth=128, warps=4, stages=3, resident=2)
SLIM = HeadTile(rows=32, ids=128, depth=128, warps=4, stages=3, resident=2)
MIDDLE = HeadTile(rows=64, ids=128, depth=64, warps=4, stages=4, resident=2)
WIDE = HeadTile(rows=128, ids=128, depth=64, warps=8, stages=4, resident=1)
# Float32 is multiplied by plain fused multiply-adds, which take more registers.
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
) -> Found:
    """What one pass over this rank's part of the head finds; `soft` is empty.

    `Found.met` brings ranks together and `fold_triton.measured` makes statistics of it. Ids
    are absolute. The arguments mean what they do for `row_stats_triton.measured_statistics`.

    Args:
        hidden: ``[rows, hidden]``, at least one row, of the dtype of the head's weight.
        head: the head; its `weight` and `soft_cap` are what is read.
        temperature: float32 ``[rows]`` or None.
        keys: int64 ``[rows]`` or None.
        forbidden: id that is never chosen, or None.
        tile: how to cut the work, or None for `tile_for`.

    Raises:
        ValueError: the head has no weight, or one of another dtype or width than `hidden`.
    """
    weight = checked_weight(hidden, head)
    tile = tile or tile_for(len(hidden), hidden.dtype)
    rows, device, ids = len(hidden), hidden.device, head.ids
    soft = hidden.new_zeros((rows, 0), dtype=torch.float32)
    if not len(ids):
        return _nothing(rows, device, soft)
    one = Pass.plan(rows, len(ids), tile, device)
    tensors, wanted = per_row(hidden, temperature, keys)
    barred = -1 if forbidden is None else forbidden
    common = (*operands(hidden, weight, head), *tensors, *one.partial.tensors)
    common += (rows, ids.start, len(ids), barred)
    wanted |= constants(hidden, head, tile)
    cut = {"ROWS": tile.rows, "IDS": tile.ids}
    cut |= {"num_warps": tile.warps, "num_stages": tile.stages}
    head_kernel[one.grid](*common, one.share, **cut, **wanted)
    numbers, picks = outputs(rows, device)
    cut = {"ROWS": tile.draw_rows, "SPLITS": read_at_once(one.grid[1]), "num_warps": 4}
    grid = (triton.cdiv(rows, tile.draw_rows),)
    head_draw_kernel[grid](*common, one.grid[1], numbers, picks, **cut, **wanted)
    return as_found(numbers, picks, soft)


def checked_weight(hidden: torch.Tensor, head: Head) -> torch.Tensor:
    """The head's weight, once it is clear that the kernels can read it; raises ValueError."""
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


def operands(hidden: torch.Tensor, weight: torch.Tensor, head: Head) -> tuple[Any, ...]:
    """The product's part of a kernel's arguments."""
    cap = 0.0 if head.soft_cap is None else float(head.soft_cap)
    return hidden, hidden.stride(0), weight, weight.stride(0), hidden.shape[1], cap


def constants(hidden: torch.Tensor, head: Head, tile: HeadTile) -> dict[str, Any]:
    """The product's part of a kernel's constants."""
    even = hidden.shape[1] % tile.depth == 0
    return {"CAPPED": head.soft_cap is not None, "EVEN": even, "DEPTH": tile.depth}


def _nothing(rows: int, device: torch.device, soft: torch.Tensor) -> Found:
    """Of a rank that has only padding."""
    none = torch.full((rows,), -torch.inf, device=device)
    zero, first = none.new_zeros(rows), torch.zeros(rows, dtype=torch.int64, device=device)
    return Found(none, first, none, none, first, none, zero, zero, soft)


@triton.jit
def capped(x, cap):  # type: ignore[no-untyped-def]
    """``cap * tanh(x / cap)``, off by at most ``2e-7 * cap``."""
    # Triton has no tanh. Where the exponential overflows, the quotient is 0, as it should be.
    return cap - (2.0 * cap) / (tl.exp(x * (2.0 / cap)) + 1.0)


@triton.jit
def product(  # type: ignore[no-untyped-def]
    hidden, hidden_stride, weight, weight_stride, width, cap, row, of_head,
    CAPPED: tl.constexpr, EVEN: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Logits float32 ``[rows, ids]`` of rows of hidden states and rows of the head."""
    step = tl.arange(0, DEPTH)
    x_at = hidden + row.to(tl.int64)[:, None] * hidden_stride + step[None, :]
    w_at = weight + of_head.to(tl.int64)[None, :] * weight_stride + step[:, None]
    logits = tl.zeros((row.shape[0], of_head.shape[0]), tl.float32)
    for start in range(0, width, DEPTH):
        if EVEN:
            x, w = tl.load(x_at), tl.load(w_at)
        else:
            x = tl.load(x_at, mask=(start + step < width)[None, :], other=0.0)
            w = tl.load(w_at, mask=(start + step < width)[:, None], other=0.0)
        logits = tl.dot(x, w, logits, input_precision="ieee")
        x_at += DEPTH
        w_at += DEPTH
    if CAPPED:
        logits = capped(logits, cap)
    return logits


@triton.jit(do_not_specialize=["rows", "first_id", "count", "forbidden", "share"])
def head_kernel(  # type: ignore[no-untyped-def]
    hidden, hidden_stride, weight, weight_stride, width, cap, temperature, keys,
    numbers, picks, of_forbidden, rows, first_id, count, forbidden, share,
    ROWS: tl.constexpr, IDS: tl.constexpr, DEPTH: tl.constexpr,
    TEMPERED: tl.constexpr, NOISE: tl.constexpr, CAPPED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Pass over some tiles of the head for some rows; grid (row tiles, splits).

    Row tiles vary fastest, so that programs that run together read the same part of the head.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    near = tl.minimum(row, rows - 1)  # rows behind the last are computed, but not written
    inverse = one_over(temperature, near, TEMPERED)
    low, high = near.to(tl.uint32), near.to(tl.uint32)
    if NOISE:
        low, high = split_keys(tl.load(keys + near))
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    drawn = tl.full((ROWS,), float("-inf"), tl.float32)
    total, weighted = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
    token, group = tl.full((ROWS,), first_id, tl.int32), tl.full((ROWS,), first_id, tl.int32)
    start = tl.program_id(1) * share * IDS
    for begin in range(start, tl.minimum(start + share * IDS, count), IDS):
        own = begin + tl.arange(0, IDS)  # ids of this rank, from 0
        x = product(
            hidden, hidden_stride, weight, weight_stride, width, cap,
            near, tl.minimum(own, count - 1), CAPPED, EVEN, DEPTH,
        )  # fmt: skip
        first = first_id + begin
        if (forbidden >= first) & (forbidden < first + IDS):
            is_barred = (own + first_id == forbidden)[None, :]
            at = of_forbidden + row[:, None] + tl.zeros_like(own)[None, :]
            tl.store(at, x, mask=is_barred & (row < rows)[:, None])
        allowed = (own < count) & (own + first_id != forbidden)
        x = tl.where(allowed[None, :], x, float("-inf"))
        best, token, total, weighted, drawn, group = fold(
            tl.reshape(x, (ROWS, IDS // _GROUP, _GROUP)), first, inverse, low, high,
            best, token, total, weighted, drawn, group, NOISE,
        )  # fmt: skip
    leave(numbers, picks, row, rows, best, token, total, weighted, drawn, group)


@triton.jit(do_not_specialize=["rows", "first_id", "count", "forbidden", "splits"])
def head_draw_kernel(  # type: ignore[no-untyped-def]
    hidden, hidden_stride, weight, weight_stride, width, cap, temperature, keys,
    numbers, picks, of_forbidden, rows, first_id, count, forbidden, splits, out, chosen,
    ROWS: tl.constexpr, SPLITS: tl.constexpr, DEPTH: tl.constexpr,
    TEMPERED: tl.constexpr, NOISE: tl.constexpr, CAPPED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Merge the splits of some rows, and draw within the drawn group; grid (row tiles,)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    near = tl.minimum(row, rows - 1)
    inverse = one_over(temperature, near, TEMPERED)
    best, token, origin, total, weighted, drawn, group = merge(
        numbers, picks, of_forbidden, near, rows, splits, inverse, forbidden, SPLITS
    )
    sample, scaled = token, best * inverse
    if NOISE:
        low, high = split_keys(tl.load(keys + near))
        own = group[:, None] - first_id + tl.arange(0, _GROUP)[None, :]
        step = tl.arange(0, DEPTH)
        x_at = hidden + near.to(tl.int64)[:, None] * hidden_stride + step[None, :]
        from_head = tl.minimum(own, count - 1).to(tl.int64) * weight_stride
        w_at = weight + from_head[:, :, None] + step[None, None, :]
        products = tl.zeros((ROWS, _GROUP, DEPTH), tl.float32)
        for start in range(0, width, DEPTH):
            ok = start + step < width
            x = tl.load(x_at + start, mask=ok[None, :], other=0.0).to(tl.float32)
            w = tl.load(w_at + start, mask=ok[None, None, :], other=0.0).to(tl.float32)
            products += x[:, None, :] * w
        logits = tl.sum(products, 2)
        if CAPPED:
            logits = capped(logits, cap)
        allowed = (own < count) & (own + first_id != forbidden)
        logits = tl.where(allowed, logits, float("-inf"))
        sample, scaled = pick(logits, group, inverse, low, high)
    finish(
        out, chosen, row, rows, best * inverse, token, origin * inverse, total, weighted, drawn,
        sample, scaled,
    )  # fmt: skip
