"""Block routing against a loop over tokens and experts, and which rows form a block."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_dllm.families.llada2_2.block_routing import BlockRows, block_routing

# Few values, so that ties are common.
LOGITS = torch.tensor([-2.0, -0.5, 0.0, 0.5, 2.0])


def by_loops(
    logits: torch.Tensor, bias: torch.Tensor, block: list[int], capacity: int, top_k: int
) -> tuple[list[list[int]], list[list[float]]]:
    share = logits.sigmoid()
    score = (share + bias).tolist()
    chosen, weights = [], []
    for row, own in enumerate(block):
        rows = [other for other, number in enumerate(block) if number == own]
        best = [max(score[r][e] for r in rows) for e in range(logits.shape[1])]
        pool = sorted(range(len(best)), key=lambda e: (-best[e], e))[:capacity]
        experts = sorted(pool, key=lambda e: (-score[row][e], e))[:top_k]
        total = sum(float(share[row, e]) for e in experts)
        chosen.append(experts)
        weights.append([2.5 * float(share[row, e]) / total for e in experts])
    return chosen, weights


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    capacity=st.integers(2, 6),
)
def test_equals_the_loop(seed: int, sizes: list[int], capacity: int) -> None:
    g = torch.Generator().manual_seed(seed)
    block = [n for n, size in enumerate(sizes) for _ in range(size)]
    logits = LOGITS[torch.randint(5, (len(block), 6), generator=g)]
    bias = torch.tensor([0.0, 0.25])[torch.randint(2, (6,), generator=g)]
    weights, chosen = block_routing(logits, bias, torch.tensor(block), capacity, 2, 2.5)
    wanted, shares = by_loops(logits, bias, block, capacity, 2)
    assert chosen.tolist() == wanted
    assert torch.allclose(weights, torch.tensor(shares), atol=1e-6)


@pytest.mark.parametrize(
    ("positions", "padded", "wanted"),
    [
        # Two canvases, and the second and third block of a prompt whose last one is partial.
        ([0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 8, 9], 14, [0] * 4 + [1] * 4 + [2] * 4 + [3] * 2),
        # Padding joins no block, whatever its positions are.
        ([4, 5], 5, [0, 0, 2, 3, 4]),
        # A dummy batch.
        ([0, 0, 0], 3, [0, 1, 2]),
        ([7, 7], 2, [0, 0]),
    ],
)
def test_which_rows_form_a_block(positions: list[int], padded: int, wanted: list[int]) -> None:
    rows = BlockRows(16, length=4)
    rows.block.fill_(-7)
    rows.find(torch.tensor(positions), padded)
    assert rows.block[:padded].tolist() == wanted
    assert (rows.block[:padded] <= rows.place[:padded]).all()


def test_nan_stays_in_its_block() -> None:
    logits = torch.zeros(4, 6)
    logits[1, 2] = torch.nan
    logits[2:, 4] = 1.0
    weights, chosen = block_routing(logits, torch.zeros(6), torch.tensor([0, 0, 1, 1]), 2, 1, 1.0)
    assert chosen[2:].tolist() == [[4], [4]]
    assert weights[2:].isfinite().all()
