"""Masks: predicates against hand-drawn pictures, and a kernel's rule against its predicate."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.ops import attention_reference as masks
from tests.support.ops.attention_reference import Mask, QuerySpan, interval


@pytest.mark.parametrize(
    ("mask", "start", "picture"),
    [
        (masks.causal(), 3, ["####..", "#####.", "######"]),
        # The chunk begins and ends inside no block: position 4 is the next block's first.
        (masks.block_causal(4), 2, ["####..", "####..", "######", "######"]),
        (masks.bidirectional(), 4, ["######", "######"]),
        (masks.window_causal(2), 3, ["..##..", "...##.", "....##"]),
        # W = 2 reaches one token each way, not two.
        (masks.window_symmetric(2), 3, ["..###.", "...###", "....##"]),
        # One left edge for all: W - 1 tokens before the canvas, not before each query.
        (masks.window_reference(2), 3, ["..####", "..####", "..####"]),
        (masks.window_reference(1), 3, ["...###", "...###", "...###"]),
    ],
    ids=lambda value: value.name if isinstance(value, Mask) else None,
)
def test_what_a_query_sees(mask: Mask, start: int, picture: list[str]) -> None:
    seen = mask.dense(QuerySpan(start, 6))
    assert ["".join("#" if key else "." for key in row) for row in seen] == picture


MAKERS = (
    masks.block_causal,
    masks.window_causal,
    masks.window_symmetric,
    masks.window_reference,
    lambda _: masks.causal(),
    lambda _: masks.bidirectional(),
)


@given(
    make=st.sampled_from(MAKERS),
    number=st.integers(1, 40),
    start=st.integers(0, 70),
    queries=st.integers(1, 40),
)
def test_a_rule_means_its_mask(make, number: int, start: int, queries: int) -> None:
    """The kernel's interval holds exactly the keys that the predicate lets a query see."""
    mask, span = make(number), QuerySpan(start, start + queries)
    q, k = torch.arange(start, span.end), torch.arange(span.end)
    first, end = interval(q, span, mask.rule, mask.window_width)
    inside = (k[None, :] >= first[:, None]) & (k[None, :] < end[:, None])
    assert torch.equal(inside, mask.dense(span))
    # What the kernel's tile skipping rests on.
    assert (first.diff() >= 0).all()
    assert (end.diff() >= 0).all()
    # A window is its layer's: without one its rule sees everything before.
    first, _ = interval(q, span, mask.rule, 0)
    assert not first.any()
