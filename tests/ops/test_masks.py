"""Masks: rules against hand-drawn pictures, and against predicates."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_dllm.ops.attention.masks import (
    WHOLE,
    MaskRule,
    QuerySpan,
    WindowRule,
    interval,
    visible,
)

NONE, SYMMETRIC, REFERENCE = WindowRule


@pytest.mark.parametrize(
    ("rule", "width", "start", "picture"),
    [
        (MaskRule(1, NONE), 0, 3, ["####..", "#####.", "######"]),
        # The chunk begins and ends inside no block: position 4 is the next block's first.
        (MaskRule(4, NONE), 0, 2, ["####..", "####..", "######", "######"]),
        (MaskRule(WHOLE, NONE), 0, 4, ["######", "######"]),
        # A request whose rule has a window sees everything on a layer without one.
        (MaskRule(WHOLE, SYMMETRIC), 0, 4, ["######", "######"]),
        (MaskRule(1, SYMMETRIC), 2, 3, ["..##..", "...##.", "....##"]),
        # W = 2 reaches one token each way, not two.
        (MaskRule(WHOLE, SYMMETRIC), 2, 3, ["..###.", "...###", "....##"]),
        # One left edge for all: W - 1 tokens before the canvas, not before each query.
        (MaskRule(WHOLE, REFERENCE), 2, 3, ["..####", "..####", "..####"]),
        (MaskRule(WHOLE, REFERENCE), 1, 3, ["...###", "...###", "...###"]),
    ],
)
def test_what_a_query_sees(rule: MaskRule, width: int, start: int, picture: list[str]) -> None:
    rows = visible(QuerySpan(start, 6), rule, width)
    assert ["".join("#" if seen else "." for seen in row) for row in rows] == picture


# Rules by whether query q sees key k, where the query begins at s; n is a number of the mask.
PREDICATES = (
    (lambda n: MaskRule(n, NONE), lambda q, k, s, n: k // n <= q // n),
    (lambda n: MaskRule(1, NONE), lambda q, k, s, n: k <= q),
    (lambda n: MaskRule(WHOLE, NONE), lambda q, k, s, n: k >= 0),
    (lambda n: MaskRule(1, SYMMETRIC), lambda q, k, s, n: (k <= q) & (q - k < n)),
    (lambda n: MaskRule(WHOLE, SYMMETRIC), lambda q, k, s, n: (q - k).abs() < n),
    (lambda n: MaskRule(WHOLE, REFERENCE), lambda q, k, s, n: k > s - n),
)


@given(
    of=st.sampled_from(PREDICATES),
    number=st.integers(1, 40),
    start=st.integers(0, 70),
    queries=st.integers(1, 40),
)
def test_a_rule_means_its_mask(of, number: int, start: int, queries: int) -> None:
    """The kernel's interval holds exactly the keys that the predicate lets a query see."""
    span, rule = QuerySpan(start, start + queries), of[0](number)
    q, k = torch.arange(*span), torch.arange(span.end)
    sees = of[1](q[:, None], k, start, number).expand(queries, -1)
    assert torch.equal(visible(span, rule, number), sees)
    first, end = interval(q, span, rule, number)
    # What the kernel's tile skipping rests on.
    assert (first.diff() >= 0).all()
    assert (end.diff() >= 0).all()
