"""The likeliest tokens of rows, in order."""

from __future__ import annotations

import pytest
import torch

from vllm_dllm.ops.statistics.ranked import RankedTokens, ranked_tokens

FORBIDDEN = 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_a_sort(dtype: torch.dtype) -> None:
    """Of few values, so that ties are common; the forbidden token has no share."""
    g = torch.Generator().manual_seed(1)
    logits = (torch.randint(8, (50, 40), generator=g) / 2).to(dtype)
    logits[:, FORBIDDEN] = 9.0
    found = ranked_tokens(logits.clone(), FORBIDDEN, 6)
    allowed = logits.float().index_fill(1, torch.tensor([FORBIDDEN]), -torch.inf)
    order = allowed.sort(dim=1, descending=True, stable=True).indices[:, :6]
    assert torch.equal(found.tokens, order)
    assert torch.allclose(found.probability, allowed.softmax(1).gather(1, order))


def test_a_near_certain_mask_leaves_the_others_their_shares() -> None:
    logits = torch.zeros(1, 8)
    logits[0, FORBIDDEN], logits[0, 5] = 60.0, 1.0
    found = ranked_tokens(logits, FORBIDDEN, 2)
    assert found.tokens.tolist() == [[5, 0]]
    total = torch.e + 6
    assert found.probability[0].tolist() == pytest.approx([torch.e / total, 1 / total])


def test_rows_are_joined_and_taken() -> None:
    parts = [RankedTokens(torch.arange(4).view(2, 2) + n, torch.ones(2, 2)) for n in (0, 4)]
    both = RankedTokens.join(parts).view(2, 2)
    assert both.tokens.shape == both.probability.shape == (2, 2, 2)
    assert both.take(torch.tensor([1])).tokens.tolist() == [[[4, 5], [6, 7]]]
