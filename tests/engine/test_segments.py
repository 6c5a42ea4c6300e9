"""Virtual sequences cut a query exactly at block boundaries."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vllm_dllm.families.block_causal.attention import split_into_blocks

ROWS = st.lists(st.integers(1, 70), min_size=1, max_size=6)


def segments(rows: list[int], block: int) -> list[tuple[int, int, int, int]]:
    """(row, first query token, query tokens, keys cut), from the function under test."""
    lengths = np.array(rows, dtype=np.int32)
    row, query_start, hidden_keys = split_into_blocks(lengths, block)
    columns = row, query_start[:-1], np.diff(query_start), hidden_keys
    return list(zip(*(column.tolist() for column in columns), strict=True))


@given(ROWS, st.sampled_from([1, 8, 16, 32]))
def test_equals_the_loop(rows: list[int], block: int) -> None:
    wanted, start = [], 0
    for row, tokens in enumerate(rows):
        for begin in range(0, tokens, block):
            end = min(begin + block, tokens)
            wanted.append((row, start + begin, end - begin, tokens - end))
        start += tokens
    assert segments(rows, block) == wanted


@given(st.integers(1, 70), st.integers(0, 3), st.sampled_from([8, 16, 32]))
def test_mask_is_block_causal(tokens: int, context_blocks: int, block: int) -> None:
    """Query i sees key j exactly when j's block is not behind i's."""
    context = context_blocks * block
    total = context + tokens
    for _, start, length, cut in segments([tokens], block):
        for i in range(context + start, context + start + length):
            seen = set(range(total - cut))
            assert seen == {j for j in range(total) if j // block <= i // block}
