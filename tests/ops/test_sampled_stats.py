"""Statistics over tiles against whole rows, and whole rows against float64 and plain counting."""

from __future__ import annotations

import pytest
import torch

from tests.ops.test_noise import chi_square, limit
from vllm_dllm.ops.noise import row_keys
from vllm_dllm.ops.sampled_stats import (
    TILE_COPIES,
    Head,
    sampled_statistics,
    tile_shape,
    tiled_statistics,
)

VOCABULARIES = (1, 7, 64, 100, 1000)
HIDDEN = 16


def case(vocabulary: int, seed: int = 0, rows: int = 24) -> dict[str, torch.Tensor]:
    """Logits with ties, exclusions and some greedy rows."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocabulary, generator=g) * 6
    logits[0] = 0  # all tied
    logits[1] = logits[1].round()  # many ties
    if vocabulary > 2:
        logits[2, 1:] = -torch.inf  # one token left, the first
        logits[3, :-1] = -torch.inf  # one token left, the last
        logits[4, ::2] = -torch.inf
    temperature = torch.rand(rows, generator=g) * 1.2 + 0.05
    temperature[5:8] = 0
    return {
        "logits": logits,
        "temperature": temperature,
        "keys": row_keys(torch.arange(rows), seed),
        "embedding": torch.randn(vocabulary, HIDDEN, generator=g),
    }


def tiled(c: dict[str, torch.Tensor], ids: int, rows: int = 24) -> tuple:
    """The tiled function with tiles of exactly `ids` tokens, on rows that index the logits."""
    index = torch.arange(len(c["logits"]))[:, None]
    head = Head(
        logits=lambda hidden, first, end: c["logits"][hidden[:, 0], first:end],
        vocabulary=c["logits"].shape[1],
        embedding=c["embedding"],
    )
    budget = 4 * TILE_COPIES * rows * ids
    return tiled_statistics(index, head, c["temperature"], c["keys"], budget)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("ids", [1, 5, 64, 99, 4096])
def test_tiles_equal_whole_rows(vocabulary: int, ids: int) -> None:
    c = case(vocabulary, seed=ids)
    want, distribution = sampled_statistics(c["logits"], c["temperature"], c["keys"])
    got, soft = tiled(c, ids)
    assert torch.equal(got.token, want.token)
    assert torch.equal(got.sample, want.sample)
    exact_p, exact_h, exact_soft = in_float64(c)
    # The budget: what eager float32 on whole rows loses against float64, and twice that for the
    # other order of summation; at least a few units in the last place.
    exact_top, exact_drawn = (
        exact_p.gather(1, ids[:, None])[:, 0] for ids in (want.token, want.sample)
    )
    for name, mine, eager, exact in (
        ("entropy", got.entropy, want.entropy, exact_h),
        ("soft", soft, distribution @ c["embedding"], exact_soft),
        ("probability", got.probability, want.probability, exact_top),
        ("sample", got.sample_probability, want.sample_probability, exact_drawn),
    ):
        budget = 3 * (eager.double() - exact).abs().max() + 4e-6
        error = (mine.double() - exact).abs().max()
        assert error <= budget, (name, float(error), float(budget))


def in_float64(c: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    greedy = c["temperature"] == 0
    scaled = c["logits"].double() / torch.where(greedy, 1e-9, c["temperature"].double())[:, None]
    first = torch.nn.functional.one_hot(c["logits"].argmax(-1), scaled.shape[1]).double()
    p = torch.where(greedy[:, None], first, scaled.softmax(-1))
    return p, -torch.xlogy(p, p).sum(-1), p @ c["embedding"].double()


def test_ties_go_to_the_lowest_id() -> None:
    c = case(100)
    c["logits"][:] = 3.0
    c["temperature"][:] = 0
    for ids in (1, 7, 100):
        statistics, _ = tiled(c, ids)
        assert (statistics.token == 0).all()
        assert (statistics.sample == 0).all()


def test_rows_are_split_too() -> None:
    """More rows than a chunk holds: the same numbers as one by one."""
    g = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(5000, 4, generator=g), torch.randn(9, 4, generator=g)
    head = Head(lambda h, a, b: h @ weight[a:b].T, 9, weight)
    temperature, keys = torch.full((5000,), 0.7), row_keys(torch.arange(5000))
    many, soft = tiled_statistics(hidden, head, temperature, keys, 1 << 20)
    one, soft_one = tiled_statistics(hidden[4999:], head, temperature[4999:], keys[4999:], 1 << 20)
    assert many.sample.shape == (5000,)
    assert many.sample[4999] == one.sample[0]
    torch.testing.assert_close(soft[4999], soft_one[0])


def test_samples_follow_the_distribution() -> None:
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(1)) * 2
    rows = 20_000
    keys = row_keys(torch.arange(rows), 9)
    head = Head(lambda hidden, first, end: logits[:, first:end].expand(len(hidden), -1), 40)
    statistics, soft = tiled_statistics(
        torch.zeros(rows, 1), head, torch.full((rows,), 0.8), keys, 1 << 20
    )
    assert soft is None
    assert chi_square(statistics.sample, (logits[0] / 0.8).softmax(-1)) < limit(40)


def test_tile_shape_respects_the_budget() -> None:
    for rows in (1, 32, 8192):
        for budget in (1 << 16, 1 << 25):
            used_rows, ids = tile_shape(rows, 262_144, budget)
            assert 4 * TILE_COPIES * used_rows * ids <= max(budget, 4 * TILE_COPIES * used_rows)
