"""Masks: predicates against hand-drawn pictures, and a kernel's rule against its predicate."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_dllm.ops.attention import masks
from vllm_dllm.ops.attention.masks import Mask, QuerySpan, interval


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
    rows = mask.dense(QuerySpan(start, 6))
    assert ["".join("#" if seen else "." for seen in row) for row in rows] == picture


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


def test_a_window_is_its_layers() -> None:
    """A request whose rule has a window sees everything on a layer without one."""
    q = torch.arange(4, 8)
    rule = masks.window_symmetric(2).rule
    first, end = interval(q, QuerySpan(4, 8), rule, 0)
    assert first.tolist() == [0] * 4
    assert end.tolist() == [8] * 4
