"""Row statistics against float64."""

from __future__ import annotations

import pytest
import torch

from vllm_dllm.ops.row_stats import row_statistics


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocabulary", [2, 31, 512, 4097])
def test_against_float64(dtype: torch.dtype, vocabulary: int) -> None:
    """Budget: float32's own error on the same softmax, times four for the summation order."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = (torch.randn(40, vocabulary, generator=generator) * 4).to(dtype)
    forbidden = vocabulary // 2
    found = row_statistics(logits, forbidden)
    exact = logits.double().softmax(-1)
    budget = 4 * (logits.float().softmax(-1).double() - exact).abs().max() + 1e-12
    exact[:, forbidden] = -1
    assert torch.equal(found.token, exact.argmax(-1))
    assert found.probability.dtype == torch.float32
    assert (found.probability.double() - exact.amax(-1)).abs().max() <= budget


def test_forbidden_token_keeps_its_probability() -> None:
    """It is never chosen, but the others' probabilities are the model's own."""
    logits = torch.tensor([[0.0, 5.0, 1.0]])
    before = logits.clone()
    found = row_statistics(logits, forbidden=1)
    assert found.token.tolist() == [2]
    torch.testing.assert_close(found.probability, before.softmax(-1)[:, 2])
    assert torch.equal(logits, before), "the caller's logits were changed"


def test_ties_go_to_the_lowest_id() -> None:
    logits = torch.zeros(3, 7)
    assert row_statistics(logits, forbidden=0).token.tolist() == [1, 1, 1]
    assert row_statistics(logits, forbidden=6).token.tolist() == [0, 0, 0]


def test_extreme_logits_stay_finite() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4]])
    probability = row_statistics(logits, forbidden=2).probability
    torch.testing.assert_close(probability, torch.tensor([1.0, 1 / 3]))


def test_view() -> None:
    found = row_statistics(torch.randn(6, 5), forbidden=0).view(2, 3)
    assert found.token.shape == found.probability.shape == (2, 3)
