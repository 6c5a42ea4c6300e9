"""Statistics of a head that is spread over ranks: what one rank finds in whole rows."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.ops.ranks import ThreadCollectives
from vllm_dllm.ops.statistics.head import Head, Shard
from vllm_dllm.ops.statistics.rows import EntropyStatistics, row_statistics
from vllm_dllm.ops.statistics.sharded import sharded_statistics

# Units in the last place of a float32 sum of `vocabulary` terms, with room for exp and log.
EPSILON = 2.0**-23


def found_by(logits: torch.Tensor, ranks: int, forbidden: int, budget: int) -> list:
    """What each rank returns; the last one may be left with padding alone."""
    vocabulary = logits.shape[1]
    width = -(-vocabulary // ranks)
    everyone = ThreadCollectives(ranks)

    def rank(n: int) -> EntropyStatistics:
        first, end = n * width, min((n + 1) * width, vocabulary)
        head = Head(
            logits=lambda hidden, a, b: logits[hidden[:, 0], a:b],
            vocabulary=vocabulary,
            shard=Shard(first, end, width, everyone.gather, everyone.sum),
        )
        rows = torch.arange(len(logits))[:, None]
        return sharded_statistics(rows, head, forbidden, entropy=True, budget=budget)

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(rank, range(ranks)))


@settings(max_examples=60)
@given(
    seed=st.integers(0, 1000),
    vocabulary=st.integers(5, 70),
    ranks=st.integers(1, 4),
    scale=st.sampled_from([0.0, 1.0, 40.0]),
    budget=st.sampled_from([1, 1 << 20]),
    data=st.data(),
)
def test_as_one_rank(
    seed: int, vocabulary: int, ranks: int, scale: float, budget: int, data: st.DataObject
) -> None:
    """Scale 0 makes every logit equal: the lowest id wins, also across ranks."""
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(6, vocabulary, generator=generator)
    forbidden = data.draw(st.integers(0, vocabulary - 1))
    # The forbidden id is the likeliest in some rows, and must count in the sums there.
    logits[::2, forbidden] += 3.0
    want = row_statistics(logits.double(), forbidden, entropy=True)
    exact = logits.double().softmax(-1)
    entropy = -torch.xlogy(exact, exact).sum(-1)
    for got in found_by(logits, ranks, forbidden, budget):
        assert torch.equal(got.token, want.token)
        # The distance to the maximum is rounded once, and exp turns that into a relative error.
        error = EPSILON * (vocabulary + 2 * logits.abs().amax() + 8)
        torch.testing.assert_close(
            got.probability.double(),
            exact.gather(1, want.token[:, None])[:, 0],
            rtol=error.item(),
            atol=1e-30,
        )
        torch.testing.assert_close(got.entropy.double(), entropy, rtol=0, atol=error.item() * 8)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_is_seen_by_all(value: float) -> None:
    logits = torch.zeros(2, 8)
    logits[1, 6] = value
    for got in found_by(logits, 2, forbidden=0, budget=1 << 20):
        assert got.probability[0].isfinite()
        assert not got.probability[1].isfinite()
