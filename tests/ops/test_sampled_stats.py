"""Statistics over tiles against whole rows, and whole rows against float64 and plain counting."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.support.ops.chi_square import chi_square, limit
from tests.support.ops.ranks import ThreadCollectives
from vllm_dllm.ops.noise.keyed import row_keys
from vllm_dllm.ops.statistics.groups import GROUP
from vllm_dllm.ops.statistics.head import Head, Shard
from vllm_dllm.ops.statistics.sampled import sampled_statistics
from vllm_dllm.ops.statistics.tiled import TILE_COPIES, average, tile_shape, tiled_statistics

VOCABULARIES = (1, 7, 128, 300, 1000)
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
    assert tile_shape(rows, head.vocabulary, budget) == (rows, min(ids, head.vocabulary))
    return tiled_statistics(index, head, c["temperature"], c["keys"], budget)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("ids", [GROUP, 3 * GROUP, 32 * GROUP])
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
    c = case(500)
    c["logits"][:] = 3.0
    c["temperature"][:] = 0
    for ids in (GROUP, 2 * GROUP, 4 * GROUP):
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


@pytest.mark.parametrize("vocabulary", [40, 3 * GROUP + 10])
def test_samples_follow_the_distribution(vocabulary: int) -> None:
    """Also across groups: the two stages together must give the softmax."""
    logits = torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(1)) * 2
    rows = 20_000
    keys = row_keys(torch.arange(rows), 9)
    head = Head(lambda hidden, first, end: logits[:, first:end].repeat(len(hidden), 1), vocabulary)
    statistics, soft = tiled_statistics(
        torch.zeros(rows, 1), head, torch.full((rows,), 0.8), keys, 1 << 20
    )
    assert soft is None
    expected = (logits[0] / 0.8).softmax(-1)
    # Rare tokens together: a chi-square wants some counts in every class.
    rare = expected * rows < 10
    classes = torch.where(rare, 0, torch.cumsum(~rare, 0))
    merged = torch.zeros(int(classes.max()) + 1).index_add_(0, classes, expected)
    assert chi_square(classes[statistics.sample], merged) < limit(len(merged))


def test_tile_shape_respects_the_budget() -> None:
    for rows in (1, 32, 8192):
        for budget in (1 << 16, 1 << 25):
            used_rows, ids = tile_shape(rows, 262_144, budget)
            assert ids % GROUP == 0
            assert 4 * TILE_COPIES * used_rows * ids <= max(
                budget, 4 * TILE_COPIES * used_rows * GROUP
            )


@pytest.mark.parametrize("vocabulary", [40, 3 * GROUP + 10, 1000])
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_find_what_one_finds(vocabulary: int, ranks: int) -> None:
    """Shards of whole groups draw the same; a rank may be left with padding alone."""
    c = case(vocabulary)
    width = GROUP * -(-vocabulary // (GROUP * ranks))
    everyone = ThreadCollectives(ranks)

    def rank(n: int) -> tuple:
        first, end = n * width, min((n + 1) * width, vocabulary)
        head = Head(
            logits=lambda hidden, a, b: c["logits"][hidden[:, 0], a:b],
            vocabulary=vocabulary,
            embedding=c["embedding"][first:end],
            shard=Shard(first, end, width, everyone.gather, everyone.sum),
        )
        index = torch.arange(len(c["logits"]))[:, None]
        found = tiled_statistics(index, head, c["temperature"], c["keys"], 1 << 16)
        whole = head.whole(index)
        return *found, whole, average(head, whole.softmax(-1))

    with ThreadPoolExecutor(ranks) as pool:
        results = list(pool.map(rank, range(ranks)))
    want, soft = tiled(c, 32 * GROUP)
    for got, got_soft, whole, mean in results:
        assert torch.equal(got.token, want.token)
        assert torch.equal(got.sample, want.sample)
        torch.testing.assert_close(got.entropy, want.entropy, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(got_soft, soft, atol=1e-5, rtol=1e-5)
        assert torch.equal(whole, c["logits"])
        plain = c["logits"].softmax(-1) @ c["embedding"]
        torch.testing.assert_close(mean, plain, atol=1e-5, rtol=1e-5)


def test_shards_that_begin_inside_a_group_draw_the_distribution() -> None:
    """The last group of one rank and the first of the next must not share their noise."""
    vocabulary, width, rows = 2 * GROUP + 60, GROUP + 30, 20_000
    # All that matters lies in those two groups.
    logits = torch.full((1, vocabulary), -9.0)
    logits[0, GROUP : width + GROUP] = 0
    logits[0, width + 5] = 3.0
    everyone = ThreadCollectives(2)

    def rank(n: int) -> torch.Tensor:
        first, end = n * width, min((n + 1) * width, vocabulary)
        head = Head(
            logits=lambda hidden, a, b: logits[:, a:b].repeat(len(hidden), 1),
            vocabulary=vocabulary,
            shard=Shard(first, end, width, everyone.gather, everyone.sum),
        )
        keys, temperature = row_keys(torch.arange(rows), 4), torch.ones(rows)
        return tiled_statistics(torch.zeros(rows, 1), head, temperature, keys, 1 << 25)[0].sample

    with ThreadPoolExecutor(2) as pool:
        samples, same = pool.map(rank, range(2))
    assert torch.equal(samples, same)
    expected = logits[0].softmax(-1)
    classes = (torch.arange(vocabulary) >= width).long() + (expected > expected.max() / 2)
    merged = torch.zeros(3).index_add_(0, classes, expected)
    assert chi_square(classes[samples], merged) < limit(3)
