"""Row statistics against float64, and of models of uniform noise against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.ops.chi_square import follows
from tests.support.ops.ranks import on_ranks
from tests.support.ops.statistics_cases import case, check_equal, found_by
from vllm_dllm.ops.noise.keyed import row_keys
from vllm_dllm.ops.statistics.head import Head, Shard
from vllm_dllm.ops.statistics.rows import (
    GROUP,
    EntropyStatistics,
    group_starts,
    ranked_tokens,
    row_statistics,
)
from vllm_dllm.ops.statistics.sampled import (
    drawn_logprob,
    drawn_weight,
    sampled_partials,
    soft_embedding,
    with_drawn,
)

FORBIDDEN = 3


def random(*shape: int, seed: int, spread: float) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * spread


# ------------------------------------------------------------------ whole rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocabulary", [2, 31, 4097])
def test_rows_against_float64(dtype: torch.dtype, vocabulary: int) -> None:
    """Budget: float32's own error on the same softmax, times four for the summation order."""
    logits = random(40, vocabulary, seed=vocabulary, spread=4).to(dtype)
    forbidden, before = vocabulary // 2, logits.clone()
    found = row_statistics(logits, forbidden)
    assert torch.equal(logits, before), "the caller's logits were changed"
    exact = logits.double().softmax(-1)
    budget = 4 * (logits.float().softmax(-1).double() - exact).abs().max() + 1e-12
    exact[:, forbidden] = -1  # never chosen, but the others' probabilities are the model's own
    assert torch.equal(found.token, exact.argmax(-1))
    assert found.probability.dtype == torch.float32
    assert (found.probability.double() - exact.amax(-1)).abs().max() <= budget


@pytest.mark.parametrize(
    ("logits", "forbidden", "token", "probability"),
    [
        ([[0.0] * 7] * 2, 0, [1, 1], [1 / 7, 1 / 7]),  # ties go to the lowest id
        ([[0.0] * 7] * 2, 6, [0, 0], [1 / 7, 1 / 7]),
        ([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4]], 2, [0, 0], [1.0, 1 / 3]),
    ],
)
def test_ties_and_extremes(
    logits: list[list[float]], forbidden: int, token: list[int], probability: list[float]
) -> None:
    found = row_statistics(torch.tensor(logits), forbidden)
    assert found.token.tolist() == token
    torch.testing.assert_close(found.probability, torch.tensor(probability))


def test_entropy_is_that_of_the_softmax() -> None:
    """Against float64; rows with excluded tokens and a certain row among them."""
    logits = random(5, 40, seed=2, spread=4)
    logits[1, ::2] = -torch.inf
    logits[2] = torch.where(torch.arange(40) == 7, 0.0, -torch.inf)
    got = row_statistics(logits.clone(), FORBIDDEN, entropy=True)
    assert isinstance(got, EntropyStatistics)
    p, eager = logits.double().softmax(-1), logits.softmax(-1)
    exact = -torch.xlogy(p, p).sum(-1)
    budget = 2 * (-torch.xlogy(eager, eager).sum(-1) - exact).abs().max() + 1e-6
    assert (got.entropy - exact).abs().max() <= budget
    plain = row_statistics(logits.clone(), FORBIDDEN)
    assert torch.equal(got.token, plain.token)
    assert torch.equal(got.probability, plain.probability)


# ---------------------------------------------------------------- drawn tokens


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
    logits = random(6, 30, seed=4, spread=3)
    temperature = torch.tensor([1.0, 0.5, 2.0, 0.0, 1.0, 0.7])
    drawn = torch.tensor([3, 8, 1, 9, 20, 2])
    own_at = temperature * torch.tensor([1, 1, 1, 1, 0, 0])
    greedy = row_statistics(logits.clone(), forbidden=29)
    scaled = logits / torch.where(temperature > 0, temperature, 1.0)[:, None]
    weight = drawn_weight(greedy, scaled, drawn)
    got = with_drawn(greedy, weight, temperature > 0, drawn, own_at)
    plain = with_drawn(greedy, weight, temperature > 0, drawn)
    p = logits.softmax(-1).gather(1, drawn[:, None])[:, 0]
    torch.testing.assert_close(got.probability, torch.tensor([*p[:3], *plain.probability[3:]]))
    assert torch.equal(got.token, plain.token)


@pytest.mark.parametrize("temperature", [0.05, 1.0, 3.0, 0.0])
def test_the_logprob_of_a_drawn_token_is_that_at_temperature_1(temperature: float) -> None:
    """Against float64. Budget: roundings of 2^-24, of results and of exponents."""
    logits = random(400, 300, seed=5, spread=4)
    scaled = logits / (temperature or 1.0)
    scaled[:, 299] = -torch.inf
    drawn = scaled.double().softmax(-1).multinomial(1, generator=torch.Generator().manual_seed(6))
    greedy = row_statistics(logits.clone(), forbidden=299)
    weight = drawn_weight(greedy, scaled, drawn[:, 0])
    found = drawn_logprob(greedy, weight, torch.full((400,), temperature))
    reported = drawn if temperature else greedy.token[:, None]
    exact = logits.double().log_softmax(-1).gather(1, reported)[:, 0]
    largest = logits.abs().amax(1).double()
    assert ((found - exact).abs() <= 2**-24 * (8 + 8 * largest)).all()


# --------------------------------------------------------- the likeliest tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranked_tokens_equal_a_sort(dtype: torch.dtype) -> None:
    """Of few values, so that ties are common; the forbidden token, though likely, has no share."""
    g = torch.Generator().manual_seed(1)
    logits = (torch.randint(8, (50, 40), generator=g) / 2).to(dtype)
    logits[:, FORBIDDEN] = 60.0
    found = ranked_tokens(logits.clone(), FORBIDDEN, 6)
    allowed = logits.float().index_fill(1, torch.tensor([FORBIDDEN]), -torch.inf)
    order = allowed.sort(dim=1, descending=True, stable=True).indices[:, :6]
    assert torch.equal(found.tokens, order)
    assert torch.allclose(found.probability, allowed.softmax(1).gather(1, order))


# -------------------------------------------------------------------- draws


def head_of(c: dict[str, torch.Tensor], **changes: Any) -> Head:
    """A head whose hidden states are row numbers of the logits."""

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        return c["logits"][hidden[:, 0], head.ids.start : head.ids.stop]

    head = Head(logits, c["logits"].shape[1], **{"embedding": c["embedding"], **changes})
    return head


# One id; less than a group; whole groups; a ragged one.
@pytest.mark.parametrize("vocabulary", [1, 7, 128, 1000])
def test_a_pass_equals_the_reference(vocabulary: int) -> None:
    c = case(vocabulary, seed=vocabulary)
    check_equal(c, *found_by(c["logits"], head_of(c), c["temperature"], c["keys"]))


def test_samples_follow_the_distribution() -> None:
    """Also across groups: the two stages together must give the softmax."""
    rows, vocabulary = 20_000, 3 * GROUP + 10
    logits = random(1, vocabulary, seed=1, spread=2)
    warmth, keys = torch.full((rows,), 0.8), row_keys(torch.arange(rows), 9)
    found, _ = sampled_partials(
        logits.repeat(rows, 1), warmth, keys, group_starts(0, vocabulary, keys.device)
    )
    assert follows(found.sample, (logits[0] / 0.8).softmax(-1))


# ----------------------------------------------------------------------- ranks


@pytest.mark.parametrize(("vocabulary", "ranks"), [(40, 2), (3 * GROUP + 10, 2), (1000, 3)])
def test_ranks_find_what_one_finds(vocabulary: int, ranks: int) -> None:
    """Shards of whole groups draw the same; a rank may be left with padding alone."""
    c = case(vocabulary)
    index, given = torch.arange(len(c["logits"]))[:, None], (c["temperature"], c["keys"])

    def rank(shard: Shard) -> tuple[Any, ...]:
        head = head_of(c, embedding=c["embedding"][shard.first : shard.end], shard=shard)
        own = head.logits(index)
        whole = head.of_all_ranks(own)
        found, weight = sampled_partials(whole, *given, group_starts(0, vocabulary, whole.device))
        mean = soft_embedding(weight, head, c["temperature"], found, found)
        return *found_by(own, head, *given), whole, mean

    width = GROUP * -(-vocabulary // (GROUP * ranks))
    for got, got_soft, whole, mean in on_ranks(ranks, vocabulary, width, rank):
        check_equal(c, got, got_soft)
        assert torch.equal(whole, c["logits"])
        check_equal(c, got, mean)


def test_shards_that_begin_inside_a_group_draw_the_distribution() -> None:
    """The last group of one rank and the first of the next must not share their noise."""
    vocabulary, width, rows = 2 * GROUP + 60, GROUP + 30, 20_000
    # All that matters lies in those two groups.
    logits = torch.full((1, vocabulary), -9.0)
    logits[0, GROUP : width + GROUP] = 0
    logits[0, width + 5] = 3.0

    def rank(shard: Shard) -> torch.Tensor:
        head = head_of({"logits": logits, "embedding": None}, shard=shard)
        keys, temperature = row_keys(torch.arange(rows), 4), torch.ones(rows)
        own = head.logits(torch.zeros(rows, 1, dtype=torch.int64))
        return found_by(own, head, temperature, keys)[0].sample

    samples, same = on_ranks(2, vocabulary, width, rank)
    assert torch.equal(samples, same)
    expected = logits[0].softmax(-1)
    classes = (torch.arange(vocabulary) >= width).long() + (expected > expected.max() / 2)
    merged = torch.zeros(3).index_add_(0, classes, expected)
    assert follows(classes[samples], merged)
