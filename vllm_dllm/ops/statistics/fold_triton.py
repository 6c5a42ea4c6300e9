"""Folding logits into a few numbers for each row: device functions of the row-statistics kernels.

All numbers of a group of 64 ids are relative to the group's own maximum. A group's score therefore
does not depend on tiles, splits or other rows, and neither does a sample, except where two scores
tie within rounding.
"""

# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

from vllm_dllm.ops.noise.keyed_triton import gumbel
from vllm_dllm.ops.statistics.groups import GROUP
from vllm_dllm.ops.statistics.sampled import FIRST_GROUP_INDEX

# Two to a power below this is 0 in float32. Exponents are clamped to it, because 0 * -inf would be
# NaN in the sums.
LEAST_EXPONENT = tl.constexpr(-160.0)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
_GROUP = tl.constexpr(GROUP)
_FIRST_GROUP_INDEX = tl.constexpr(FIRST_GROUP_INDEX)


@triton.jit
def inverse_temperature(temperature, row):  # type: ignore[no-untyped-def]
    """1 / temperature of some rows, 1 for greedy ones."""
    if temperature is not None:
        value = tl.load(temperature + row)
        inverse = 1.0 / tl.where(value > 0, value, 1.0)
    else:
        inverse = tl.full(row.shape, 1.0, tl.float32)
    return inverse


@triton.jit
def fold(  # type: ignore[no-untyped-def]
    x, first, inverse, low, high, best, token, total, weighted, drawn, group, DRAWS: tl.constexpr
):
    """Fold a tile of logits into the running state of its rows.

    `x` is float32 ``[rows, groups, 64]``, from id `first` on, and -inf for ids that may not be
    chosen. `low` and `high` are the halves of the rows' keys, `inverse` is 1 / temperature.

    The state has the parts that `rows_triton.rows_kernel` stores, each ``[rows]``: the largest
    logit `best` and its id `token`, the sums `total` and `weighted`, the drawn group's score
    `drawn` and its first id `group`.
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
