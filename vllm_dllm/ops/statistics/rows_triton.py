"""Row statistics of materialised logits in one pass, as Triton kernels.

What `row_stats.row_statistics` and `sampled_stats.sampled_statistics` compute, without a row of
probabilities: one kernel passes over the logits, a grid of (rows, splits of the vocabulary), and
leaves a few numbers for each split; a second one merges them and draws within the drawn group.
`fold_triton` has what they are made of.
"""

# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_dllm.ops.noise.keyed_triton import split_keys
from vllm_dllm.ops.statistics.fold_triton import (
    MeasuredStatistics,
    Pass,
    as_found,
    finish,
    fold,
    leave,
    measured,
    merge,
    one_over,
    outputs,
    per_row,
    pick,
    read_at_once,
)
from vllm_dllm.ops.statistics.sampled import GROUP

_GROUP = tl.constexpr(GROUP)


@dataclass(frozen=True)
class RowTile:
    """How the pass over materialised logits is cut.

    Attributes:
        rows, ids: of a tile; powers of two, ids at least `GROUP`.
        warps: of a program.
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

    Without temperature, `token`, `probability` and `entropy` are those of `row_statistics`; with
    temperature and keys and without a forbidden id, all fields are those of
    `sampled_statistics`. Differences are of float32 rounding: the argmax is taken before the
    division by the temperature, and sums are in another order.

    Args:
        logits: ``[rows, vocabulary]``, at least one row, float32, bfloat16 or float16; ids are
            contiguous, rows may lie any distance apart. -inf excludes a token, not all of a row
            may be. Not written to.
        temperature: float32 ``[rows]``, at least 0; None for 1 in all rows.
        keys: int64 ``[rows]``, see `noise.row_keys`; None draws nothing, and the sample is the
            argmax.
        forbidden: an id that is neither the argmax nor drawn, but takes part in the
            normalisation, or None.
        tile: how to cut the work, or None for the default.

    Returns:
        Statistics of shape ``[rows]``. Ties go to the lowest id.

    Raises:
        ValueError: the ids of a row are not contiguous.
    """
    if logits.stride(1) != 1 and logits.shape[1] > 1:
        raise ValueError("logits must be contiguous along the vocabulary")
    tile = tile or RowTile()
    (rows, vocabulary), device = logits.shape, logits.device
    one = Pass.plan(rows, vocabulary, tile, device)
    tensors, wanted = per_row(logits, temperature, keys)
    barred = -1 if forbidden is None else forbidden
    common = (logits, logits.stride(0), *tensors, *one.partial.tensors, rows, vocabulary, barred)
    cut = {"ROWS": tile.rows, "IDS": tile.ids, "num_warps": tile.warps}
    rows_kernel[one.grid](*common, one.share, **cut, **wanted)
    numbers, picks = outputs(rows, device)
    cut = {"ROWS": tile.draw_rows, "SPLITS": read_at_once(one.grid[1]), "num_warps": 2}
    grid = (triton.cdiv(rows, tile.draw_rows),)
    draw_kernel[grid](*common, one.grid[1], numbers, picks, **cut, **wanted)
    found = as_found(numbers, picks, torch.empty((rows, 0), device=device))
    greedy = torch.zeros((), dtype=torch.bool, device=device)
    return measured(found, greedy if temperature is None else temperature == 0)


@triton.jit(do_not_specialize=["rows", "forbidden", "share"])
def rows_kernel(  # type: ignore[no-untyped-def]
    logits, stride, temperature, keys, numbers, picks, of_forbidden, rows,
    vocabulary, forbidden, share,
    ROWS: tl.constexpr, IDS: tl.constexpr, TEMPERED: tl.constexpr, NOISE: tl.constexpr,
):  # fmt: skip
    """Pass over some tiles of some rows of logits; grid (row tiles, splits)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    near = tl.minimum(row, rows - 1)  # rows behind the last are computed, but not written
    inverse = one_over(temperature, near, TEMPERED)
    low, high = near.to(tl.uint32), near.to(tl.uint32)
    if NOISE:
        low, high = split_keys(tl.load(keys + near))
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    drawn = tl.full((ROWS,), float("-inf"), tl.float32)
    total, weighted = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
    token, group = tl.zeros((ROWS,), tl.int32), tl.zeros((ROWS,), tl.int32)
    start = tl.program_id(1) * share * IDS
    for first in range(start, tl.minimum(start + share * IDS, vocabulary), IDS):
        ids = first + tl.arange(0, IDS)[None, :]
        at = logits + near.to(tl.int64)[:, None] * stride + ids
        x = tl.load(at, mask=ids < vocabulary, other=float("-inf")).to(tl.float32)
        if (forbidden >= first) & (forbidden < first + IDS):
            own = (ids == forbidden) & (row < rows)[:, None]
            tl.store(of_forbidden + row[:, None] + tl.zeros_like(ids), x, mask=own)
        x = tl.where(ids == forbidden, float("-inf"), x)
        best, token, total, weighted, drawn, group = fold(
            tl.reshape(x, (ROWS, IDS // _GROUP, _GROUP)), first, inverse, low, high,
            best, token, total, weighted, drawn, group, NOISE,
        )  # fmt: skip
    leave(numbers, picks, row, rows, best, token, total, weighted, drawn, group)


@triton.jit(do_not_specialize=["rows", "forbidden", "splits"])
def draw_kernel(  # type: ignore[no-untyped-def]
    logits, stride, temperature, keys, numbers, picks, of_forbidden, rows,
    vocabulary, forbidden, splits, out, chosen,
    ROWS: tl.constexpr, SPLITS: tl.constexpr, TEMPERED: tl.constexpr, NOISE: tl.constexpr,
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
        ids = group[:, None] + tl.arange(0, _GROUP)[None, :]
        at = logits + near.to(tl.int64)[:, None] * stride + ids
        ok = (ids < vocabulary) & (ids != forbidden)
        x = tl.load(at, mask=ok, other=float("-inf")).to(tl.float32)
        sample, scaled = pick(x, group, inverse, low, high)
    finish(
        out, chosen, row, rows, best * inverse, token, origin * inverse, total, weighted, drawn,
        sample, scaled,
    )  # fmt: skip
