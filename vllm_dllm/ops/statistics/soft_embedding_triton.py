"""The soft embedding ``softmax(logits / T) @ embedding`` over tiles of the head, as Triton kernels.

It takes a second pass over the head, after that of `rows_triton`. For one range of ids at a time, a
kernel computes the logits again and writes their weights, exp((logit - origin) / T), to a workspace
in the embedding's dtype; another kernel multiplies the weights by the embedding and adds the
product to a float32 sum. The origin is the row's largest logit, so that weights keep all their
bits; float16 probabilities would lose some. At the end the sum is divided by the row's sum of
weights. Nothing is added atomically, so results are the same in every run.
"""

# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_dllm.ops.compiled import compiled
from vllm_dllm.ops.device import multiprocessors
from vllm_dllm.ops.statistics.head import Head
from vllm_dllm.ops.statistics.partials import SoftmaxPartials
from vllm_dllm.ops.statistics.rows import SampledStatistics
from vllm_dllm.ops.statistics.rows_triton import (
    LOG2_E,
    empty,
    head_statistics,
    pass_constants,
    product,
    product_arguments,
    tile_for,
    tiles_per_split,
)
from vllm_dllm.ops.statistics.tiled import Result

# With few rows, each range of ids is split into parts, each with a separate sum.
MAX_PARTS = 8


@dataclass(frozen=True)
class SumTile:
    """How the product of weights and embedding is divided among programs."""

    rows: int = 128  # rows, columns of the embedding and ids of a tile
    width: int = 256
    depth: int = 64
    warps: int = 8  # as for `Tile`
    stages: int = 3
    resident: int = 1


FLOAT32_SUM = SumTile(rows=32, width=64, depth=32, warps=4, resident=4)


def fused_statistics(
    hidden: torch.Tensor,
    head: Head,
    temperature: torch.Tensor,
    keys: torch.Tensor,
    budget: int,
    compile: bool = False,
) -> Result:
    """Compute the result of `tiled.tiled_statistics` in two passes of Triton kernels.

    The weights of the soft embedding are rounded to the embedding's dtype, as in `tiled` on a GPU.
    The arguments are the same, but hidden states have the dtype of the head's `weight`, and its
    `logits` are not called. The workspace of the soft embedding is limited by `budget`, but has at
    least what 128 ids need; the statistics use some kilobytes per row in addition.

    Raises:
        ValueError: as `head_statistics`.
    """
    partials = head_statistics(hidden, head, temperature, keys).merge_ranks(head.shard)
    finish = compiled(_finished) if compile else _finished
    statistics = finish(partials, temperature)
    if head.embedding is None:
        return statistics, None
    soft = soft_embedding(hidden, head, temperature, partials, budget)
    return statistics, soft if head.shard is None else head.shard.sum(soft)


def _finished(partials: SoftmaxPartials, temperature: torch.Tensor) -> SampledStatistics:
    return partials.sampled_statistics(temperature == 0)


def soft_embedding(
    hidden: torch.Tensor,
    head: Head,
    temperature: torch.Tensor,
    partials: SoftmaxPartials,
    budget: int,
) -> torch.Tensor:
    """This rank's share of ``softmax(logits / temperature) @ embedding``, float32.

    Rows at temperature 0 are the embedding of their token. `partials` are the results of the first
    pass over all ranks, with no id forbidden; the other arguments are those of `fused_statistics`.

    Raises:
        ValueError: the embedding's rows are not contiguous, or as `head_statistics`.
    """
    embedding = head.embedding
    assert embedding is not None
    if embedding.stride(1) != 1:
        raise ValueError("the embedding must have contiguous rows")
    source, tile = product_arguments(hidden, head), tile_for(len(hidden), hidden.dtype)
    rows, count, device = len(hidden), len(head.ids), hidden.device
    sum_tile = FLOAT32_SUM if embedding.dtype == torch.float32 else SumTile()
    parts, width_of_range = _workspace(rows, embedding, sum_tile, budget, max(tile.ids, 128))
    weights = empty((rows, width_of_range), embedding.dtype, device)
    # Part i sums part i of every range of ids.
    sums = torch.zeros((parts, rows, embedding.shape[1]), device=device)
    of_rows = (
        temperature.float().contiguous(),
        partials.origin.contiguous(),
        partials.token.contiguous(),
    )
    for first in range(0, count, width_of_range):
        in_range = min(width_of_range, count - first)
        weights_kernel[triton.cdiv(rows, tile.rows), triton.cdiv(in_range, tile.ids)](
            *source, *of_rows, weights, weights.stride(0), rows, first, count, head.ids.start,
            **pass_constants(source, tile), num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        _add_range(sums, weights, embedding, first, in_range, sum_tile)
    total = torch.where(temperature == 0, 1.0, partials.sum)
    return (sums[0] if parts == 1 else sums.sum(0)).div_(total[:, None])


def _workspace(
    rows: int, embedding: torch.Tensor, tile: SumTile, budget: int, multiple: int
) -> tuple[int, int]:
    """The number of parts, and of the ids of a range, which is a multiple of `multiple`."""
    count, width = embedding.shape
    tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(width, tile.width)
    at_once = tile.resident * multiprocessors(embedding.device)
    steps = 64  # about as many as a range has
    parts = min(MAX_PARTS, triton.cdiv(steps, tiles_per_split(tiles, steps, at_once)))
    # The sums take up to half of the budget. A single one does not count: it is the result.
    bytes_of_sum = 4 * rows * width
    parts = max(1, min(parts, budget // 2 // bytes_of_sum))
    left = budget - (parts * bytes_of_sum if parts > 1 else 0)
    ids = left // (rows * embedding.element_size()) // multiple * multiple
    return parts, min(max(multiple, ids), triton.cdiv(max(1, count), multiple) * multiple)


def _add_range(
    sums: torch.Tensor,
    weights: torch.Tensor,
    embedding: torch.Tensor,
    first: int,
    in_range: int,
    tile: SumTile,
) -> None:
    """Add the weights of the `in_range` ids from `first` on times their embedding."""
    parts, rows, width = sums.shape
    steps_per_part = triton.cdiv(triton.cdiv(in_range, tile.depth), parts)
    sum_kernel[triton.cdiv(rows, tile.rows), triton.cdiv(width, tile.width), parts](
        weights, weights.stride(0), embedding, embedding.stride(0), sums, rows, width,
        first, in_range, steps_per_part,
        ROWS=tile.rows, WIDTH=tile.width, DEPTH=tile.depth, EVEN=width % tile.width == 0,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "first", "count", "first_id"])
def weights_kernel(  # type: ignore[no-untyped-def]
    hidden, hidden_stride, weight, weight_stride, width, cap, temperature, origin, token,
    weights, weights_stride, rows, first, count, first_id,
    ROWS: tl.constexpr, IDS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """A tile of exp(logit / T - origin), of ids from `first` on; the grid is (row tiles, id tiles).

    Greedy rows have weight 1 at their token and 0 elsewhere. `token` is an id of the whole
    vocabulary, of which this rank's part begins at `first_id`. Columns after the last id get finite
    numbers, which the sum does not use.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    near = tl.minimum(row, rows - 1)
    column = tl.program_id(1) * IDS + tl.arange(0, IDS)
    local = first + column
    x = product(
        hidden, hidden_stride, weight, weight_stride, width, cap,
        near, tl.minimum(local, count - 1), EVEN, DEPTH,
    )  # fmt: skip
    t = tl.load(temperature + near)
    inverse = 1.0 / tl.where(t > 0, t, 1.0)
    distance = x * inverse[:, None] - tl.load(origin + near)[:, None]
    value = tl.exp2(distance * LOG2_E)
    certain = tl.where((local + first_id)[None, :] == tl.load(token + near)[:, None], 1.0, 0.0)
    value = tl.where((t > 0)[:, None], value, certain)
    pointers = weights + row.to(tl.int64)[:, None] * weights_stride + column[None, :]
    tl.store(pointers, value.to(weights.dtype.element_ty), mask=(row < rows)[:, None])


@triton.jit(do_not_specialize=["rows", "first", "in_range", "steps_per_part"])
def sum_kernel(  # type: ignore[no-untyped-def]
    weights, weights_stride, embedding, embedding_stride, sums, rows, width,
    first, in_range, steps_per_part,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Add weights times embedding to a tile of one part's sum.

    The grid is (row tiles, column tiles, parts).
    """
    begin_row = tl.program_id(0) * ROWS
    row = begin_row + tl.arange(0, ROWS)
    near = tl.minimum(row, rows - 1) - begin_row
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    part = tl.program_id(2)
    begin = part * steps_per_part * DEPTH
    end = tl.minimum(begin + steps_per_part * DEPTH, in_range)
    step = tl.arange(0, DEPTH)
    x_pointer = weights + begin_row.to(tl.int64) * weights_stride + begin
    x_offset = near[:, None] * weights_stride + step[None, :]
    e_pointer = embedding + (first + begin).to(tl.int64) * embedding_stride
    e_offset = step[:, None] * embedding_stride + column[None, :]
    ok = (row < rows)[:, None] & (column < width)[None, :]
    sum_offset = (
        part.to(tl.int64) * rows * width + row.to(tl.int64)[:, None] * width + column[None, :]
    )
    sum = tl.load(sums + sum_offset, mask=ok, other=0.0)
    for start in range(begin, end, DEPTH):
        x = tl.load(x_pointer + x_offset)
        is_id = (start + step < end)[:, None]  # after the last id the embedding counts as 0
        if EVEN:
            e = tl.load(e_pointer + e_offset, mask=is_id, other=0.0)
        else:
            e = tl.load(e_pointer + e_offset, mask=is_id & (column < width)[None, :], other=0.0)
        sum = tl.dot(x, e, sum, input_precision="ieee")
        x_pointer += DEPTH
        e_pointer += DEPTH * embedding_stride
    tl.store(sums + sum_offset, sum, mask=ok)
