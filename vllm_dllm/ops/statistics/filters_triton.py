"""The floor of each row that top-k, top-p and min-p leave, found without sorting.

A filter excludes the scores below some number, so a row's floor says all of it. Scores of float32
are ordered as integers, whose digits are found from the highest to the lowest: of 16 candidates for
a digit, the largest above which enough tokens (top-k) or enough probability (top-p) remain. Tokens
that tie with the last one are kept, as vLLM's top-k does.
"""

# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from vllm_dllm.ops.statistics.row_changes import RowChanges
from vllm_dllm.ops.statistics.scores_triton import LogitRows, empty, read_scores

IDS = 1024  # read at a time


def read_with(
    rows: LogitRows,
    changes: RowChanges | None,
    filters: tuple[torch.Tensor, ...] | None,
    temperature: torch.Tensor | None = None,
    forbidden: int | None = None,
) -> LogitRows:
    """The rows with changes and filters.

    Kernels are compiled for rows with both and for rows with neither, so that either comes with the
    other, which may change or exclude nothing. The filters of canvases, ``[n]`` each, apply one
    after the other: min-p (float32, or 0), top-k (int64, or the size of the vocabulary) and top-p
    (float32, or 1). They apply to scores divided by `temperature` (float32 ``[rows]``; None for 1,
    which also stands in for 0). The forbidden id is left out of account.
    """
    if changes is None and filters is None:
        return rows
    (count, ids), device = rows.logits.shape, rows.logits.device
    if changes is None:
        changes = RowChanges.none(-(-count // rows.length), device)
    rows = replace(rows, changes=changes)
    if filters is None:
        return replace(rows, floor=torch.full((count,), -torch.inf, device=device))
    floor = empty((count,), torch.float32, device)  # the least score that each row keeps
    floors_kernel[(count,)](
        *rows.arguments, temperature, *filters, floor,
        ids, -1 if forbidden is None else forbidden, IDS=IDS, num_warps=8,
    )  # fmt: skip
    return replace(rows, floor=floor)


@triton.jit
def order_of(x):  # type: ignore[no-untyped-def]
    """Float32 numbers as uint32 in the same order."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, ~bits, bits | 0x80000000)


@triton.jit
def in_order(order):  # type: ignore[no-untyped-def]
    """The inverse of `order_of`."""
    bits = tl.where(order >> 31 != 0, order & 0x7FFFFFFF, ~order)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def tile_of(  # type: ignore[no-untyped-def]
    logits, stride, cap, added, changes, length, row, begin, count, forbidden, IDS: tl.constexpr
):
    """Scores ``[1, IDS]`` from an id on, with -inf for the forbidden one."""
    local = (begin + tl.arange(0, IDS))[None, :]
    x = read_scores(logits, stride, cap, added, changes, None, length, row, local, count)
    return tl.where(local == forbidden, float("-inf"), x)


@triton.jit
def weight_of(x, floor, top, inverse):  # type: ignore[no-untyped-def]
    """The probabilities of scores relative to that of the largest one; 0 below the floor."""
    return tl.where(x >= floor, tl.exp((x - top) * inverse), 0.0)


@triton.jit
def least_kept(  # type: ignore[no-untyped-def]
    logits, stride, cap, added, changes, length, row, count, forbidden, floor, top, inverse, target,
    WEIGHS: tl.constexpr, IDS: tl.constexpr,
):  # fmt: skip
    """The largest score with at least `target` tokens (or weights) at and above it, ``[1]``."""
    found = (row * 0).to(tl.uint32)
    for place in range(8):
        digit = 28 - 4 * place
        candidates = found[:, None] | (tl.arange(0, 16)[None, :].to(tl.uint32) << digit)
        total = tl.zeros((1, 16), tl.float32)
        for begin in range(0, count, IDS):
            x = tile_of(
                logits, stride, cap, added, changes, length, row, begin, count, forbidden, IDS
            )  # fmt: skip
            weight = tl.where(x >= floor, 1.0, 0.0)
            if WEIGHS:
                weight = weight_of(x, floor, top, inverse)
            above = order_of(x)[:, None, :] >= candidates[:, :, None]  # [1, 16, IDS]
            total += tl.sum(tl.where(above, weight[:, None, :], 0.0), 2)
        # Totals fall from candidate to candidate, and the first one always counts.
        enough = tl.sum((total >= target).to(tl.int32), 1)
        found |= tl.maximum(enough - 1, 0).to(tl.uint32) << digit
    return in_order(found)


@triton.jit(do_not_specialize=["count", "forbidden"])
def floors_kernel(  # type: ignore[no-untyped-def]
    logits, stride, cap, added, changes, floor, length, temperature, min_p, top_k, top_p, out,
    count, forbidden, IDS: tl.constexpr,
):  # fmt: skip
    """The floor of one row; the grid is (rows,), and `floor` is None."""
    row = tl.program_id(0) + tl.arange(0, 1)
    canvas = tl.program_id(0) // length
    inverse = tl.full((1,), 1.0, tl.float32)
    if temperature is not None:
        value = tl.load(temperature + row)
        inverse = 1.0 / tl.where(value > 0, value, 1.0)
    least, k, p = tl.load(min_p + canvas), tl.load(top_k + canvas), tl.load(top_p + canvas)
    lowest = tl.full((1,), float("-inf"), tl.float32)
    if (least > 0) | (k < count) | (p < 1):
        top = lowest
        for begin in range(0, count, IDS):
            x = tile_of(
                logits, stride, cap, added, changes, length, row, begin, count, forbidden, IDS
            )  # fmt: skip
            top = tl.maximum(top, tl.max(x, 1))
        if least > 0:
            lowest = top + tl.log(least) / inverse
        if k < count:
            kept = least_kept(
                logits, stride, cap, added, changes, length, row, count, forbidden,
                lowest, top, inverse, k.to(tl.float32), False, IDS,
            )  # fmt: skip
            lowest = tl.maximum(lowest, kept)
        if p < 1:
            total = tl.zeros((1,), tl.float32)
            for begin in range(0, count, IDS):
                x = tile_of(
                    logits, stride, cap, added, changes, length, row, begin, count, forbidden, IDS
                )  # fmt: skip
                total += tl.sum(weight_of(x, lowest, top, inverse), 1)
            kept = least_kept(
                logits, stride, cap, added, changes, length, row, count, forbidden,
                lowest, top, inverse, p * total, True, IDS,
            )  # fmt: skip
            lowest = tl.maximum(lowest, kept)
    tl.store(out + row, lowest)
