"""Row statistics of logits in memory, as Triton kernels.

They compute what `rows.row_statistics` and `sampled.sampled_statistics` compute, without ever
holding probabilities: one kernel passes over the logits with a grid of (row tiles, splits of the
vocabulary) and leaves a few numbers for each split, and a second kernel merges them and draws
within the drawn group. `fold_triton` has the functions from which both are built.
"""

# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from dataclasses import dataclass

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
from vllm_dllm.ops.statistics.launch_triton import (
    MeasuredStatistics,
    VocabularyPass,
    as_partials,
    measured,
    merge_width,
    outputs,
    row_arguments,
)
from vllm_dllm.ops.statistics.sampled import GROUP

_GROUP = tl.constexpr(GROUP)


@dataclass(frozen=True)
class RowTile:
    """How the pass over logits is divided among programs.

    Attributes:
        rows, ids: rows and token ids of a tile; powers of two, ids at least `GROUP`.
        warps: warps of a program.
        resident: programs that are meant to share a multiprocessor.
        draw_rows: rows of a program that merges and draws.
    """

    rows: int = 1
    ids: int = 4096
    warps: int = 4
    resident: int = 4
    draw_rows: int = 1


def measured_statistics(
    logits: torch.Tensor,
    temperature: torch.Tensor | None = None,
    keys: torch.Tensor | None = None,
    forbidden: int | None = None,
    tile: RowTile | None = None,
) -> MeasuredStatistics:
    """Statistics of whole rows, in one pass over them.

    Without temperature, `token`, `probability` and `entropy` are those of `row_statistics`. With
    temperature and keys and without a forbidden id, all fields are those of `sampled_statistics`.
    They differ by float32 rounding only: the argmax is taken before the division by the
    temperature, and sums run in another order.

    Args:
        logits: ``[rows, vocabulary]``, at least one row, float32, bfloat16 or float16; ids are
            contiguous, rows may have any stride. -inf excludes a token; at least one token of a row
            must be left. Not written to.
        temperature: float32 ``[rows]``, at least 0; None for 1 in all rows.
        keys: int64 ``[rows]``, see `noise.keyed.row_keys`; with None nothing is drawn, and the
            sample is the argmax.
        forbidden: an id that is never chosen or drawn but takes part in the normalisation, or None.
        tile: how to divide the work, or None for the default.

    Returns:
        Statistics of shape ``[rows]``. Ties go to the lowest id.

    Raises:
        ValueError: the ids of a row are not contiguous.
    """
    if logits.stride(1) != 1 and logits.shape[1] > 1:
        raise ValueError("logits must be contiguous along the vocabulary")
    tile = tile or RowTile()
    (rows, vocabulary), device = logits.shape, logits.device
    vocabulary_pass = VocabularyPass.plan(rows, vocabulary, tile, device)
    tensors, flags = row_arguments(logits, temperature, keys)
    excluded = -1 if forbidden is None else forbidden
    states = vocabulary_pass.states.tensors
    common = (logits, logits.stride(0), *tensors, *states, rows, vocabulary, excluded)
    sizes = {"ROWS": tile.rows, "IDS": tile.ids, "num_warps": tile.warps}
    rows_kernel[vocabulary_pass.grid](*common, vocabulary_pass.tiles_per_split, **sizes, **flags)
    splits = vocabulary_pass.grid[1]
    numbers, ids = outputs(rows, device)
    sizes = {"ROWS": tile.draw_rows, "SPLITS": merge_width(splits), "num_warps": 2}
    grid = (triton.cdiv(rows, tile.draw_rows),)
    draw_kernel[grid](*common, splits, numbers, ids, **sizes, **flags)
    partials = as_partials(numbers, ids, torch.empty((rows, 0), device=device))
    greedy = torch.zeros((), dtype=torch.bool, device=device)
    return measured(partials, greedy if temperature is None else temperature == 0)


@triton.jit(do_not_specialize=["rows", "forbidden", "tiles_per_split"])
def rows_kernel(  # type: ignore[no-untyped-def]
    logits, stride, temperature, keys, numbers, ids, forbidden_logit, rows,
    vocabulary, forbidden, tiles_per_split,
    ROWS: tl.constexpr, IDS: tl.constexpr, TEMPERED: tl.constexpr, NOISE: tl.constexpr,
):  # fmt: skip
    """Pass over some tiles of some rows of logits; the grid is (row tiles, splits)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    near = tl.minimum(row, rows - 1)  # rows after the last one are computed but not stored
    inverse = inverse_temperature(temperature, near, TEMPERED)
    low, high = near.to(tl.uint32), near.to(tl.uint32)
    if NOISE:
        low, high = split_keys(tl.load(keys + near))
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    drawn = tl.full((ROWS,), float("-inf"), tl.float32)
    total, weighted = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
    token, group = tl.zeros((ROWS,), tl.int32), tl.zeros((ROWS,), tl.int32)
    start = tl.program_id(1) * tiles_per_split * IDS
    end = tl.minimum(start + tiles_per_split * IDS, vocabulary)
    for first in range(start, end, IDS):
        tokens = first + tl.arange(0, IDS)[None, :]
        pointers = logits + near.to(tl.int64)[:, None] * stride + tokens
        x = tl.load(pointers, mask=tokens < vocabulary, other=float("-inf")).to(tl.float32)
        if (forbidden >= first) & (forbidden < first + IDS):
            is_forbidden = (tokens == forbidden) & (row < rows)[:, None]
            forbidden_pointer = forbidden_logit + row[:, None] + tl.zeros_like(tokens)
            tl.store(forbidden_pointer, x, mask=is_forbidden)
        x = tl.where(tokens == forbidden, float("-inf"), x)
        best, token, total, weighted, drawn, group = fold(
            tl.reshape(x, (ROWS, IDS // _GROUP, _GROUP)), first, inverse, low, high,
            best, token, total, weighted, drawn, group, NOISE,
        )  # fmt: skip
    store_split(numbers, ids, row, rows, best, token, total, weighted, drawn, group)


@triton.jit(do_not_specialize=["rows", "forbidden", "splits"])
def draw_kernel(  # type: ignore[no-untyped-def]
    logits, stride, temperature, keys, numbers, ids, forbidden_logit, rows,
    vocabulary, forbidden, splits, out, out_ids,
    ROWS: tl.constexpr, SPLITS: tl.constexpr, TEMPERED: tl.constexpr, NOISE: tl.constexpr,
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
        tokens = group[:, None] + tl.arange(0, _GROUP)[None, :]
        pointers = logits + near.to(tl.int64)[:, None] * stride + tokens
        ok = (tokens < vocabulary) & (tokens != forbidden)
        x = tl.load(pointers, mask=ok, other=float("-inf")).to(tl.float32)
        sample, scaled = sample_in_group(x, group, inverse, low, high)
    store_partials(
        out, out_ids, row, rows, best * inverse, token, origin * inverse, total, weighted, drawn,
        sample, scaled,
    )  # fmt: skip
