"""Row statistics against float64."""

from __future__ import annotations

import pytest
import torch

from vllm_dllm.ops.statistics.rows import EntropyStatistics, row_statistics
from vllm_dllm.ops.statistics.sampled import drawn_logprob, drawn_weight, with_drawn


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


def test_entropy_is_that_of_the_softmax() -> None:
    """Against float64; rows with excluded tokens and a certain row among them."""
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(2)) * 4
    logits[1, ::2] = -torch.inf
    logits[2] = torch.where(torch.arange(40) == 7, 0.0, -torch.inf)
    got = row_statistics(logits.clone(), forbidden=3, entropy=True)
    assert isinstance(got, EntropyStatistics)
    p = logits.double().softmax(-1)
    exact = -torch.xlogy(p, p).sum(-1)
    eager = logits.softmax(-1)
    budget = 2 * (-torch.xlogy(eager, eager).sum(-1) - exact).abs().max() + 1e-6
    assert (got.entropy - exact).abs().max() <= budget
    plain = row_statistics(logits.clone(), forbidden=3)
    assert torch.equal(got.token, plain.token)
    assert torch.equal(got.probability, plain.probability)


def test_a_drawn_token_is_as_sure_as_it_is_likely() -> None:
    """min(probability of the argmax, weight of the draw relative to it), by hand."""
    logits = torch.tensor([[2.0, 2.0, 0.0], [2.0, 1.0, 0.0], [2.0, 1.0, 0.0], [0.0, 9.0, 0.0]])
    temperature = torch.tensor([1.0, 0.5, 0.0, 1.0])
    greedy = row_statistics(logits.clone(), forbidden=2)
    scaled = logits / torch.where(temperature > 0, temperature, 1.0)[:, None]
    drawn = torch.tensor([1, 1, 1, 1])
    got = with_drawn(greedy, drawn_weight(greedy, scaled, drawn), temperature > 0, drawn)
    p = logits.softmax(-1)
    assert got.token.tolist() == [1, 1, 0, 1]
    wanted = [p[0, 0], torch.tensor(1.0).neg().mul(2).exp(), p[2, 0], p[3, 1]]
    torch.testing.assert_close(got.probability, torch.stack(wanted))


def test_a_drawn_token_s_own_probability() -> None:
    """At temperature 1, whatever it was drawn at; other rows are as sure as without this."""
    logits = torch.randn(6, 30, generator=torch.Generator().manual_seed(4)) * 3
    temperature = torch.tensor([1.0, 0.5, 2.0, 0.0, 1.0, 0.7])
    drawn = torch.tensor([3, 8, 1, 9, 20, 2])
    own_at = temperature * torch.tensor([1, 1, 1, 1, 0, 0])
    greedy = row_statistics(logits.clone(), forbidden=29)
    scaled = logits / torch.where(temperature > 0, temperature, 1.0)[:, None]
    weight = drawn_weight(greedy, scaled, drawn)
    got = with_drawn(greedy, weight, temperature > 0, drawn, own_at)
    plain = with_drawn(greedy, weight, temperature > 0, drawn)
    p = logits.softmax(-1).gather(1, drawn[:, None])[:, 0]
    wanted = torch.tensor([*p[:3], *plain.probability[3:]])
    torch.testing.assert_close(got.probability, wanted)
    assert torch.equal(got.token, plain.token)


@pytest.mark.parametrize("temperature", [0.05, 0.7, 1.0, 3.0, 0.0])
def test_the_logprob_of_a_drawn_token_is_that_at_temperature_1(temperature: float) -> None:
    """Against float64. Budget: roundings of 2^-24, of results and of exponents."""
    logits = torch.randn(400, 300, generator=torch.Generator().manual_seed(5)) * 4
    warmth = torch.full((400,), temperature)
    scaled = logits / (temperature or 1.0)
    scaled[:, 299] = -torch.inf
    drawn = scaled.double().softmax(-1).multinomial(1, generator=torch.Generator().manual_seed(6))
    greedy = row_statistics(logits.clone(), forbidden=299)
    found = drawn_logprob(greedy, drawn_weight(greedy, scaled, drawn[:, 0]), warmth)
    exact = logits.double().log_softmax(-1).gather(1, drawn)[:, 0]
    if not temperature:
        exact = logits.double().log_softmax(-1).gather(1, greedy.token[:, None])[:, 0]
    largest = logits.abs().amax(1).double()
    assert ((found - exact).abs() <= 2**-24 * (8 + 8 * largest)).all()
