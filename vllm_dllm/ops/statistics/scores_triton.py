"""Rows of logits in memory as kernels read them: soft-capped, changed and filtered, in float32.

Logits stay in the head's dtype, and no second copy of them is made: what requests change is a few
vectors of the vocabulary for each canvas (`RowChanges`), and what their filters exclude is all that
is below one number for each row (`filters_triton`).
"""

# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from vllm_dllm.ops.statistics.row_changes import MOST_SCORE, RowChanges

_MOST = tl.constexpr(MOST_SCORE)


@dataclass(frozen=True)
class LogitRows:
    """Rows of logits of whole canvases, and what is made of them when they are read."""

    # [rows, vocabulary], float32, bfloat16 or float16, of any stride; ids are contiguous. -inf
    # excludes a token.
    logits: torch.Tensor
    length: int  # positions of a canvas
    cap: float | None = None  # logits become ``cap * tanh(logit / cap)`` first
    # int64 [rows], an id of each row, and float32 [rows], what is added to its logit.
    added: tuple[torch.Tensor, torch.Tensor] | None = None
    changes: RowChanges | None = None
    floor: torch.Tensor | None = None  # float32 [rows]; scores below it are excluded

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The first arguments of a kernel that reads these rows."""
        changes, logits = self.changes, self.logits
        if logits.stride(1) != 1 and logits.shape[1] > 1:
            raise ValueError("logits must be contiguous along the vocabulary")
        vectors = None
        if changes is not None:
            vectors = (
                *(changes.index, changes.shift, changes.ends.view(torch.uint8)),
                *(changes.early.view(torch.uint8), changes.counts, changes.penalties),
            )
        cap = None if self.cap is None else float(self.cap)
        return logits, logits.stride(0), cap, self.added, vectors, self.floor, self.length

    def whole(self) -> torch.Tensor:
        """The scores in memory, float32 ``[rows, vocabulary]``."""
        rows, count = self.logits.shape
        out = empty((rows, count), torch.float32, self.logits.device)
        write_kernel[rows, triton.cdiv(count, 4096)](*self.arguments, out, count, IDS=4096)
        return out

    def part(self, canvases: slice) -> LogitRows:
        """The rows of some of the canvases."""
        rows = slice(canvases.start * self.length, canvases.stop * self.length)
        return replace(
            self,
            logits=self.logits[rows],
            added=None if self.added is None else (self.added[0][rows], self.added[1][rows]),
            changes=None if self.changes is None else self.changes.part(canvases),
            floor=None if self.floor is None else self.floor[rows],
        )


def report(
    rows: LogitRows,
    divisor: torch.Tensor,
    listed: torch.Tensor,
    candidates: torch.Tensor,
    normalizes: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What logprobs are made of, in one pass over the rows.

    Args:
        rows: of n canvases.
        divisor: float32 ``[n]``, by which scores are divided.
        listed: int64 ``[rows, K]``, ids.
        candidates: int64 ``[rows, C]``, at most 8 more.
        normalizes: whether the results are log-probabilities.

    Returns:
        The scores of the listed ids and of the candidates, float32, and how many tokens of the row
        score at least as much as each candidate, int32.
    """
    count, device, own = len(listed), listed.device, candidates.shape
    found, scores, ranks = (
        empty(shape, dtype, device)
        for shape, dtype in (
            (listed.shape, torch.float32), (own, torch.float32), (own, torch.int32)
        )
    )  # fmt: skip
    report_kernel[(count,)](
        *rows.arguments, divisor, listed.contiguous(), candidates.contiguous(),
        found, scores, ranks, rows.logits.shape[1], listed.shape[1], own[1], int(normalizes),
        CANDIDATES=8, IDS=1024, num_warps=8,
    )  # fmt: skip
    return found, scores, ranks


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate a tensor that a kernel writes; tests replace this to fill it with garbage."""
    return torch.empty(tuple(shape), dtype=dtype, device=device)


@triton.jit
def capped(x, cap):  # type: ignore[no-untyped-def]
    """``cap * tanh(x / cap)``, off by at most ``2e-7 * cap``; x if the cap is None."""
    if cap is not None:
        # Triton has no tanh. If the exponential overflows, the quotient is 0, which is right.
        x = cap - (2.0 * cap) / (tl.exp(x * (2.0 / cap)) + 1.0)
    return x


@triton.jit
def changed(x, changes, length, row, local, count):  # type: ignore[no-untyped-def]
    """Scores ``[rows, ids]`` after the changes of each row's canvas, see `RowChanges.apply`."""
    index, shift, ends, early, counts, penalties = changes
    place = index + (row // length) * 4
    of_shift, of_ends, of_counts = tl.load(place), tl.load(place + 1), tl.load(place + 2)
    is_id = local < count
    at = of_shift.to(tl.int64)[:, None] * count + local
    added = tl.load(shift + at, mask=is_id & (of_shift >= 0)[:, None], other=0.0)
    x = tl.where(added == float("-inf"), float("-inf"), x + added)
    is_early = tl.load(early + of_ends * length + row % length, mask=of_ends >= 0, other=0)
    at = of_ends.to(tl.int64)[:, None] * count + local
    is_end = tl.load(ends + at, mask=is_id & (is_early > 0)[:, None], other=0)
    ruled_out = (is_end > 0) | (x == float("-inf"))
    penalised = of_counts >= 0
    at = of_counts.to(tl.int64)[:, None] * 2 * count + local
    seen = tl.load(counts + at, mask=is_id & penalised[:, None], other=0)
    times = tl.load(counts + at + count, mask=is_id & penalised[:, None], other=0)
    numbers = penalties + of_counts * 3
    repetition = tl.load(numbers, mask=penalised, other=1.0)[:, None]
    frequency = tl.load(numbers + 1, mask=penalised, other=0.0)[:, None]
    presence = tl.load(numbers + 2, mask=penalised, other=0.0)[:, None]
    factor = tl.where(seen > 0, repetition, 1.0)
    x = tl.where(x > 0, x / factor, x * factor)
    x -= frequency * times.to(tl.float32) + tl.where(times > 0, presence, 0.0)
    is_changed = (of_shift >= 0) | (of_ends >= 0) | penalised
    x = tl.where(is_changed[:, None], tl.minimum(tl.maximum(x, -_MOST), _MOST), x)
    return tl.where(ruled_out, float("-inf"), x)


@triton.jit
def read_scores(  # type: ignore[no-untyped-def]
    logits, stride, cap, added, changes, floor, length, row, local, count
):
    """The scores ``[rows, ids]`` of some rows; -inf for what is excluded or not an id.

    `row` is ``[rows]``, and `local` are columns, ``[1, ids]`` or of its own for each row.
    """
    at = logits + row.to(tl.int64)[:, None] * stride + local
    x = tl.load(at, mask=local < count, other=float("-inf")).to(tl.float32)
    if cap is not None:
        x = tl.where(x == float("-inf"), x, capped(x, cap))
    if added is not None:
        ids, amounts = added
        is_added = local == tl.load(ids + row)[:, None]
        x += tl.where(is_added, tl.load(amounts + row)[:, None], 0.0)
    if changes is not None:
        x = changed(x, changes, length, row, local, count)
    if floor is not None:
        x = tl.where(x < tl.load(floor + row)[:, None], float("-inf"), x)
    return x


@triton.jit(do_not_specialize=["count"])
def write_kernel(  # type: ignore[no-untyped-def]
    logits, stride, cap, added, changes, floor, length, out, count, IDS: tl.constexpr
):
    """Write scores to memory; the grid is (rows, tiles of ids)."""
    row = tl.program_id(0) + tl.arange(0, 1)
    local = (tl.program_id(1) * IDS + tl.arange(0, IDS))[None, :]
    x = read_scores(logits, stride, cap, added, changes, floor, length, row, local, count)
    at = out + row.to(tl.int64)[:, None] * count + local
    tl.store(at, x, mask=local < count)


@triton.jit(do_not_specialize=["count", "listed_count", "own_count", "normalizes"])
def report_kernel(  # type: ignore[no-untyped-def]
    logits, stride, cap, added, changes, floor, length, divisor, listed, candidates,
    listed_out, own_out, rank_out, count, listed_count, own_count, normalizes,
    CANDIDATES: tl.constexpr, IDS: tl.constexpr,
):  # fmt: skip
    """See `report`; the grid is (rows,)."""
    row = tl.program_id(0) + tl.arange(0, 1)
    rate = 1.0 / tl.load(divisor + row // length)
    place = tl.arange(0, CANDIDATES)[None, :]
    at = row.to(tl.int64)[:, None] * own_count + place
    own_id = tl.load(candidates + at, mask=place < own_count, other=0).to(tl.int32)
    own = read_scores(logits, stride, cap, added, changes, floor, length, row, own_id, count)
    rank = tl.zeros((1, CANDIDATES), tl.int32)
    top, total = tl.full((1,), float("-inf"), tl.float32), tl.zeros((1,), tl.float32)
    for begin in range(0, count, IDS):
        local = (begin + tl.arange(0, IDS))[None, :]
        x = read_scores(logits, stride, cap, added, changes, floor, length, row, local, count)
        is_id = (local < count)[:, None, :]
        rank += tl.sum(((x[:, None, :] >= own[:, :, None]) & is_id).to(tl.int32), 2)
        largest = tl.maximum(top, tl.max(x, 1))
        origin = tl.where(largest == float("-inf"), 0.0, largest)
        added_up = tl.sum(tl.exp((x - origin[:, None]) * rate[:, None]), 1)
        total = total * tl.exp((top - origin) * rate) + added_up
        top = largest
    shift = tl.where(normalizes > 0, top * rate + tl.log(total), 0.0)[:, None]
    tl.store(own_out + at, own * rate[:, None] - shift, mask=place < own_count)
    tl.store(rank_out + at, rank, mask=place < own_count)
    for begin in range(0, listed_count, 32):
        column = (begin + tl.arange(0, 32))[None, :]
        at = row.to(tl.int64)[:, None] * listed_count + column
        listed_id = tl.load(listed + at, mask=column < listed_count, other=0).to(tl.int32)
        x = read_scores(logits, stride, cap, added, changes, floor, length, row, listed_id, count)
        tl.store(listed_out + at, x * rate[:, None] - shift, mask=column < listed_count)
