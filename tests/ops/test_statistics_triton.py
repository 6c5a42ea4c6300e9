"""The kernels of row statistics and of the soft embedding against their references."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from tests.support.ops.interpreter import interpreted
from tests.support.ops.ranks import on_ranks
from vllm_dllm.ops.noise import keyed
from vllm_dllm.ops.noise.keyed import row_keys
from vllm_dllm.ops.statistics import tiled
from vllm_dllm.ops.statistics.head import Head, Shard, logits_of
from vllm_dllm.ops.statistics.rows import (
    GROUP,
    RowStatistics,
    SampledStatistics,
    group_starts,
    grouped,
    row_statistics,
    take_group,
)
from vllm_dllm.ops.statistics.sampled import FIRST_GROUP_INDEX, draw, group_noise

rows_triton = interpreted("vllm_dllm.ops.statistics.rows_triton")
soft_embedding = interpreted("vllm_dllm.ops.statistics.soft_embedding_triton")
NATIVE = torch.cuda.is_available()
DEVICE = torch.device("cuda" if NATIVE else "cpu")
# Scores are sums of a few float32 numbers below 100; what is closer than this may swap.
CLOSE = 1e-4
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Many rows a program, because the interpreter pays for programs; natively the defaults.
ROW_TILE = replace(rows_triton.IN_MEMORY, rows=32, ids=256, merged_rows=64)
TILE = rows_triton.Tile(
    rows=32, ids=128, depth=32, warps=4, stages=2, resident=1, merged_rows=1 if NATIVE else 64
)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def draws(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Temperatures, every fifth 0, and keys."""
    temperature = torch.rand(rows, generator=torch.Generator().manual_seed(rows)) * 1.2 + 0.1
    temperature[::5] = 0
    return temperature.to(DEVICE), row_keys(torch.arange(rows, device=DEVICE), 7)


def decided(scaled: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Rows whose draw is not within rounding: both stages' winners are ahead by `CLOSE`."""
    groups = grouped(scaled)
    score = groups.logsumexp(-1) + group_noise(keys, group_starts(0, scaled.shape[1], keys.device))
    chosen = score.argmax(-1)
    ids = chosen[:, None] * GROUP + torch.arange(GROUP, device=keys.device)
    inside = take_group(groups, chosen) + keyed.gumbel(keys, ids)
    sure = torch.ones_like(keys, dtype=torch.bool)
    for values in (score, inside):
        if values.shape[1] > 1:
            best = values.topk(2, -1).values
            sure &= best[:, 0] - best[:, 1] > CLOSE
    return sure


def check(
    name: str, got: torch.Tensor, exact: torch.Tensor, eager: torch.Tensor, slack: float = 4e-6
) -> None:
    """No further from float64 than three times what eager float32 is, and a few last bits."""
    budget = 3 * float((eager.double() - exact).abs().max()) + slack
    error = float((got.double() - exact).abs().max())
    assert error <= budget, (name, error, budget)


def check_all(
    got: SampledStatistics,
    exact: torch.Tensor,
    eager: torch.Tensor,
    temperature: torch.Tensor,
    keys: torch.Tensor,
    cap: float | None = None,
) -> None:
    """Statistics against those of logits in float64 and of logits in eager float32."""
    greedy = temperature == 0
    divisor = torch.where(greedy, 1.0, temperature)[:, None]
    # A capped logit is off by as much as `rows_triton.capped` states, and so are two.
    slack = 4e-6 + 4e-7 * (cap or 0.0) / float(divisor.min())
    exact, eager = exact / divisor.double(), eager / divisor
    best = exact.max(-1).values
    short = best - exact.gather(1, got.token[:, None])[:, 0]
    assert (short <= 2e-6 * (1 + best.abs())).all()
    clear = (exact >= best[:, None] - CLOSE).sum(-1) == 1
    assert torch.equal(got.token[clear], exact.argmax(-1)[clear])
    sure = decided(eager, keys) & ~greedy
    assert (sure | greedy).float().mean() > 0.9
    assert torch.equal(got.sample[sure], draw(eager, keys)[sure])
    assert torch.equal(got.sample[greedy], got.token[greedy])
    certain = torch.nn.functional.one_hot(got.token, exact.shape[1])
    p, rough = (torch.where(greedy[:, None], certain.to(s), s.softmax(-1)) for s in (exact, eager))
    for field, at in (("probability", got.token), ("sample_probability", got.sample)):
        chosen = (t.gather(1, at[:, None])[:, 0] for t in (p, rough))
        check(field, getattr(got, field), *chosen, slack)
    check("entropy", got.entropy, *(-torch.xlogy(t, t).sum(-1) for t in (p, rough)), slack)


def unread(*_: object) -> torch.Tensor:
    raise AssertionError("the reference ran")


@dataclass(frozen=True)
class Product:
    """A head and hidden states, with the logits that they have in float64 and eager float32."""

    hidden: torch.Tensor
    head: Head
    exact: torch.Tensor
    eager: torch.Tensor

    @classmethod
    def make(
        cls,
        sizes: tuple[int, int, int],
        dtype: torch.dtype = torch.float32,
        cap: float | None = None,
    ) -> Product:
        rows, vocabulary, width = sizes
        hidden = random(rows, width, seed=1)
        weight = random(vocabulary, width, seed=2) * 5 / width**0.5
        if dtype != torch.float32:
            # Sums that are exact in any order: else they might be rounded to `dtype` differently.
            hidden, weight = (x.mul(32).round().div(32) for x in (hidden, weight))
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        embedding = random(vocabulary, 40, seed=3).to(dtype)
        exact, eager = hidden.double() @ weight.double().T, hidden.float() @ weight.float().T
        if dtype != torch.float32:
            exact, eager = exact.to(dtype).double(), eager.to(dtype).float()
        if cap is not None:
            exact, eager = (x.div(cap).tanh() * cap for x in (exact, eager))
        return cls(hidden, Head(unread, vocabulary, embedding, None, weight, cap), exact, eager)


noise_kernels = interpreted("tests.support.ops.draw_noise_triton")
self_test = interpreted("vllm_dllm.ops.statistics.self_test_triton")


@pytest.fixture(autouse=True)
def garbage_before_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill the tensors that a kernel writes with garbage, so that what it leaves out is seen."""

    def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        value = float("nan") if dtype.is_floating_point else 987_654_321
        return torch.full(tuple(shape), value, dtype=dtype, device=device)

    for module in (rows_triton, soft_embedding):
        monkeypatch.setattr(module, "empty", poisoned)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that ran; running the reference fails the test."""
    found: list[str] = []

    def counted(name: str, run: Callable[..., object]) -> Callable[..., object]:
        def count(*args: object, **kwargs: object) -> object:
            found.append(name)
            return run(*args, **kwargs)

        return count

    for module in (rows_triton, soft_embedding):
        for name, kernel in vars(module).items():
            if name.endswith("_kernel"):
                monkeypatch.setattr(kernel, "run", counted(name, kernel.run))
    for name in ("tiled_statistics", "_Running"):
        monkeypatch.setattr(tiled, name, unread)
    return found


def same_rows(got: RowStatistics, want: RowStatistics) -> None:
    """Statistics with entropies of the same float32 logits."""
    assert torch.equal(got.token, want.token)
    torch.testing.assert_close(got.probability, want.probability, atol=4e-6, rtol=0)
    torch.testing.assert_close(got.entropy, want.entropy, atol=4e-6, rtol=0)


def test_noise_is_that_of_the_reference() -> None:
    """Uniform numbers bit for bit; Gumbel noise within the error that `gumbel` states."""
    keys = row_keys(torch.arange(6, device=DEVICE), 5)
    out = torch.full((2, 6, 4096), torch.nan, device=DEVICE)
    for first in (0, FIRST_GROUP_INDEX + 12_345):
        noise_kernels.noise_kernel[(6,)](keys, first, out, COUNT=4096)
        index = torch.arange(first, first + 4096, device=DEVICE)
        u = keyed.uniform(keys, index)
        assert torch.equal(out[0], u)
        exact = -(-torch.log1p(-u.double())).log()
        assert ((out[1] - exact).abs() <= 1e-6 + 2e-7 * exact.abs()).all()


@pytest.mark.parametrize(
    ("rows", "vocabulary", "dtype", "forbidden"),
    [
        (1, 7, torch.float32, None),  # less than a group
        (31, 300, torch.bfloat16, None),  # a ragged tile of rows and of ids
        (33, 1000, torch.float16, None),  # a tile of one row
        (63, 64, torch.bfloat16, None),  # exactly a group
        (129, 2049, torch.float32, None),  # several programs each way; a tile of one id
        *((33, 700, dtype, 300) for dtype in DTYPES),
    ],
)
def test_rows_of_logits(
    rows: int, vocabulary: int, dtype: torch.dtype, forbidden: int | None
) -> None:
    """Rows that lie apart, from an odd address on, between columns that must not be read.

    A forbidden id counts, but is not chosen.
    """
    wide = torch.full((rows, vocabulary + 9), torch.nan, dtype=dtype, device=DEVICE)
    logits = wide[:, 3 : vocabulary + 3]
    logits.copy_(random(rows, vocabulary) * 5)
    logits[0, vocabulary // 2 :] = -torch.inf
    if forbidden is not None:
        logits[1:9, forbidden] = 90.0  # by far the largest
        logits[9, forbidden] = -torch.inf
        logits[10, ::2] = -torch.inf
        logits[11] = 2.0  # all tied
        logits[12, 1:] = -torch.inf
    before = logits.clone()
    found = rows_triton.logits_statistics(logits, forbidden, tile=ROW_TILE)
    assert torch.equal(logits, before)
    got = found.greedy_statistics(entropy=True)
    # A column that is never chosen and weighs nothing stands in for no forbidden id.
    nothing = torch.full_like(logits[:, :1], -torch.inf)
    column = vocabulary if forbidden is None else forbidden
    want = row_statistics(torch.cat([logits, nothing], 1), column, entropy=True)
    assert torch.equal(got.token, want.token)
    assert torch.equal(found.sample, want.token)
    p = logits.double().softmax(-1)
    check("probability", got.probability, p.gather(1, want.token[:, None])[:, 0], want.probability)
    check("entropy", got.entropy, -torch.xlogy(p, p).sum(-1), want.entropy)


@pytest.mark.parametrize(
    ("dtype", "sizes", "cap"),
    [
        (torch.float32, (1, 7, 16), None),  # less than a tile in every direction
        (torch.float32, (33, 1000, 40), 8.0),  # a ragged sum of products
        (torch.bfloat16, (31, 100, 48), None),
        (torch.bfloat16, (129, 1000, 64), 30.0),  # several programs, an even sum
        (torch.float16, (33, 449, 40), 8.0),  # a last tile of one id
    ],
)
def test_heads_and_soft_embeddings(
    dtype: torch.dtype, sizes: tuple[int, int, int], cap: float | None, launches: list[str]
) -> None:
    case = Product.make(sizes, dtype, cap)
    temperature, keys = draws(sizes[0])
    got, soft = soft_embedding.fused_statistics(case.hidden, case.head, temperature, keys, 1 << 15)
    assert {"rows_kernel", "merge_kernel", "weights_kernel", "sum_kernel"} == set(launches)
    check_all(got, case.exact, case.eager, temperature, keys, cap)
    greedy = (temperature == 0)[:, None]
    embedding = case.head.embedding
    divisor = torch.where(greedy, 1.0, temperature[:, None])
    p = (case.exact / divisor.double()).softmax(-1)
    # In eager low precision the probabilities are rounded to the embedding's dtype, too.
    eager = (case.eager / divisor).softmax(-1).to(dtype).float() @ embedding.float()
    certain = embedding[got.token]
    exact = torch.where(greedy, certain.double(), p @ embedding.double())
    check("soft", soft, exact, torch.where(greedy, certain.float(), eager))
    assert torch.equal(soft[::5], certain.float()[::5])


def test_only_what_is_wanted_is_computed(launches: list[str]) -> None:
    """No embedding, no second pass; no keys, the argmax is the sample."""
    case = Product.make((5, 200, 16))
    temperature, keys = draws(5)
    head = replace(case.head, embedding=None)
    assert soft_embedding.fused_statistics(case.hidden, head, temperature, keys, 1)[1] is None
    assert launches == ["rows_kernel", "merge_kernel"]
    found = rows_triton.head_statistics(case.hidden, head, forbidden=3, tile=TILE)
    assert torch.equal(found.sample, found.token)
    want = row_statistics(case.eager.clone(), 3, entropy=True)
    same_rows(found.greedy_statistics(entropy=True), want)


def test_a_head_that_kernels_cannot_read_is_refused() -> None:
    case = Product.make((2, 70, 16))
    given, weight, embedding = draws(2), case.head.weight, case.head.embedding
    for match, hidden, changes in (
        ("no weight", case.hidden, {"weight": None}),
        ("bfloat16 of width 16", case.hidden.bfloat16(), {}),
        ("of width 8", case.hidden[:, :8].contiguous(), {}),
        ("contiguous rows", case.hidden, {"weight": weight.T.contiguous().T}),
        ("contiguous rows", case.hidden, {"embedding": embedding.T.contiguous().T}),
    ):
        with pytest.raises(ValueError, match=match):
            soft_embedding.fused_statistics(hidden, replace(case.head, **changes), *given, 1)
    with pytest.raises(ValueError, match="contiguous along the vocabulary"):
        rows_triton.logits_statistics(torch.zeros(9, 4, device=DEVICE).T)


@pytest.mark.parametrize("vocabulary", [40, 3 * GROUP + 10])
def test_ranks_find_what_one_finds(vocabulary: int) -> None:
    """Shards of whole groups draw the same; with 40 ids the second rank has padding alone."""
    case, ranks = Product.make((9, vocabulary, 32)), 2
    temperature, keys = draws(9)
    width = GROUP * -(-vocabulary // (GROUP * ranks))

    def rank(shard: Shard) -> tiled.Result:
        # A rank's weight has rows of padding behind its ids.
        own = torch.full((width, 32), torch.nan, device=DEVICE)
        own[: max(0, shard.end - shard.first)] = case.head.weight[shard.first : shard.end]
        embedding = case.head.embedding[shard.first : shard.end]
        head = replace(case.head, weight=own, embedding=embedding, shard=shard)
        return soft_embedding.fused_statistics(case.hidden, head, temperature, keys, 1 << 16)

    want, soft = soft_embedding.fused_statistics(case.hidden, case.head, temperature, keys, 1 << 16)
    for got, got_soft in on_ranks(ranks, vocabulary, width, rank):
        assert torch.equal(got.token, want.token)
        assert torch.equal(got.sample, want.sample)
        check_all(got, case.exact, case.eager, temperature, keys)
        torch.testing.assert_close(got_soft, soft, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("forbidden", [3, 130])
def test_the_forbidden_id_of_one_rank(forbidden: int) -> None:
    """It counts on the rank that has it; the other has such an id in its padding at most."""
    case = Product.make((9, 200, 32))

    def rank(shard: Shard) -> RowStatistics:
        weight = case.head.weight[shard.first : shard.end]
        head = replace(case.head, weight=weight, shard=shard)
        found = rows_triton.head_statistics(case.hidden, head, forbidden=forbidden, tile=TILE)
        return found.merge_ranks(shard).greedy_statistics(entropy=True)

    want = row_statistics(case.eager.clone(), forbidden, entropy=True)
    for got in on_ranks(2, 200, 128, rank):
        same_rows(got, want)


@pytest.mark.parametrize("budget", [1, 40_000, 1 << 20])
def test_the_workspace_keeps_to_its_budget(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with several parts of a sum, and with weights of which float16 has no probabilities."""
    case = Product.make((20, 1000, 16), torch.float16)
    even = replace(case.head, weight=torch.zeros_like(case.head.weight))
    temperature, keys = torch.ones(20, device=DEVICE), draws(20)[1]
    taken: list[int] = []
    poisoned = soft_embedding.empty

    def watched(*args: object) -> torch.Tensor:
        found = poisoned(*args)
        taken.append(found.nbytes)
        return found

    monkeypatch.setattr(soft_embedding, "empty", watched)
    found = rows_triton.head_statistics(case.hidden, even, temperature, keys)
    soft = soft_embedding.soft_embedding(case.hidden, even, temperature, found, budget)
    assert len(taken) == 1
    assert taken[0] <= max(budget, 20 * 128 * 2)
    exact = case.head.embedding.double().mean(0).expand(20, -1)
    # Weights of 1 are exact in any dtype; what is left is the sum of a thousand float32 numbers.
    torch.testing.assert_close(soft.double(), exact, atol=1e-6, rtol=1e-6)


# ----------------------------------------------------------------------- draws


def test_a_draw_is_from_the_allowed_ids() -> None:
    """Its probability is among all ids, the forbidden one included; by both kernels."""
    case, forbidden = Product.make((33, 700, 32), torch.bfloat16), 300
    temperature, keys = draws(33)
    given = temperature, keys
    found = rows_triton.head_statistics(
        case.hidden, case.head, *given, forbidden=forbidden, tile=TILE
    )
    got = found.sampled_statistics(temperature == 0)
    divisor = torch.where(temperature > 0, temperature, 1.0)[:, None]
    p, rough = (case.exact / divisor.double()).softmax(-1), (case.eager / divisor).softmax(-1)
    scaled = case.eager / divisor
    scaled[:, forbidden] = -torch.inf
    want = draw(scaled, keys)
    sure = decided(scaled, keys) & (temperature > 0)
    assert torch.equal(got.sample[sure], want[sure])
    at = got.sample[sure, None]
    chosen = (t[sure].gather(1, at)[:, 0] for t in (p, rough))
    check("sample_probability", got.sample_probability[sure], *chosen)
    found = rows_triton.logits_statistics(case.eager, forbidden, *given, tile=ROW_TILE)
    sure = decided(scaled, keys)
    assert sure.float().mean() > 0.9
    assert torch.equal(found.sample[sure], want[sure])
    weight = (scaled.gather(1, found.sample[:, None])[:, 0] - scaled.amax(-1)).double().exp()
    check("weight", (found.scaled - found.best).exp(), weight, weight.float())


def test_samples_do_not_depend_on_tiles_splits_or_the_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Product.make((37, 1500, 32), torch.bfloat16)
    temperature, keys = draws(37)
    want = rows_triton.head_statistics(case.hidden, case.head, temperature, keys, tile=TILE).sample
    shuffled = torch.randperm(37, generator=torch.Generator().manual_seed(1)).to(DEVICE)[:11]
    some = temperature[shuffled], keys[shuffled]
    got = rows_triton.head_statistics(case.hidden[shuffled], case.head, *some, tile=TILE)
    assert torch.equal(got.sample, want[shuffled])
    wide = replace(TILE, rows=64, ids=256, depth=16)
    for share in (1, 3, 100):  # tiles of a split: from many splits to one
        monkeypatch.setattr(rows_triton, "tiles_per_split", lambda *_, share=share: share)
        got = rows_triton.head_statistics(case.hidden, case.head, temperature, keys, tile=wide)
        assert torch.equal(got.sample, want)


def test_work_is_spread_over_the_multiprocessors() -> None:
    """Few rows are split as often as there are places; many rows fill whole waves."""
    for row_tiles, tiles, slots in ((1, 1228, 264), (2, 2048, 132), (32, 2048, 132)):
        share = rows_triton.tiles_per_split(row_tiles, tiles, slots)
        programs = row_tiles * -(-tiles // share)
        assert -(-tiles // share) <= rows_triton.MAX_SPLITS
        # The time of the waves over that of a perfect division.
        waves = -(-programs // slots)
        assert waves * slots * share < 1.15 * row_tiles * tiles, (row_tiles, tiles, slots)


# ------------------------------------------------------------------------ ties


def planted(cap: float | None, spread: float) -> tuple[torch.Tensor, Head]:
    """2,000 hidden states and a head of 300 ids whose likeliest tie, as bfloat16 rounds them.

    Every id has a copy of its weights in another tile (and on another rank), or such that differ
    by less than what bfloat16 keeps of a logit. `spread` is about that of logits. Sums of products
    are exact in any order, so what ties is decided by the rounding to bfloat16 alone.
    """
    vocabulary, width = 300, 16
    hidden = random(2000, width, seed=1).mul(16).round().div(16)
    weight = random(vocabulary, width, seed=2).mul(32 * spread / width**0.5).round().div(32)
    half = vocabulary // 2
    weight[half:] = weight[:half]
    weight[half::2, 0] += 1 / 32
    weight = weight.bfloat16().to(DEVICE)
    hidden, logits = hidden.bfloat16(), logits_of(weight, 0, cap)
    found = logits(hidden, 0, vocabulary)
    tied = (found == found.amax(-1, keepdim=True)).sum(-1) > 1
    assert tied.float().mean() > 0.8
    return hidden, Head(logits, vocabulary, None, None, weight, cap)


# Many rows a program, because the interpreter pays for programs.
TIES = None if NATIVE else rows_triton.Tile(1024, 128, 16, 4, 2, 1, merged_rows=1024)


@pytest.mark.slow
@pytest.mark.parametrize(("cap", "spread"), [(None, 30.0), (30.0, 10.0)])
def test_ties_of_the_head_and_of_draws(cap: float | None, spread: float) -> None:
    """The choice of kernels changes no token: the lowest id wins, whatever the operators' tiles."""
    hidden, head = planted(cap, spread)
    rows = torch.arange(len(hidden), device=DEVICE)
    keys, temperature = row_keys(rows, 5), (rows % 2) * 0.75
    found = rows_triton.head_statistics(hidden, head, temperature, keys, tile=TIES)
    got = found.sampled_statistics(temperature == 0)
    logits = head.logits(hidden, 0, head.vocabulary)
    scaled = logits / torch.where(temperature == 0, 1.0, temperature)[:, None]
    # Two scores within float32 rounding may swap.
    sure = decided(scaled, keys) | (temperature == 0)
    assert sure.float().mean() > 0.998
    for ids in (64, 192, head.vocabulary):
        budget = tiled.tile_bytes(2048, ids)
        want, _ = tiled.tiled_statistics(hidden, head, temperature, keys, budget)
        assert torch.equal(got.token, want.token)
        assert torch.equal(got.token, logits.argmax(-1))
        assert torch.equal(got.sample[sure], want.sample[sure])


@pytest.mark.slow
def test_ties_with_a_forbidden_id_and_on_ranks() -> None:
    """A masked model's statistics by both kernels; the lower rank wins a tie."""
    forbidden = 70
    hidden, head = planted(None, 30.0)
    logits = head.logits(hidden, 0, head.vocabulary).bfloat16()
    want = row_statistics(logits.clone(), forbidden)
    found = rows_triton.head_statistics(hidden, head, forbidden=forbidden, tile=TIES)
    assert torch.equal(found.token, want.token)
    tile = rows_triton.IN_MEMORY if NATIVE else TIES
    got = rows_triton.logits_statistics(logits, forbidden, tile=tile)
    assert torch.equal(got.token, want.token)

    def rank(shard: Shard) -> torch.Tensor:
        own = replace(head, weight=head.weight[shard.first : shard.end], shard=shard)
        return rows_triton.head_statistics(hidden, own, tile=TIES).merge_ranks(shard).token

    for token in on_ranks(2, head.vocabulary, 192, rank):
        assert torch.equal(token, logits.argmax(-1))


# ------------------------------------------------------- the self-test at start-up


def head_of(dtype: torch.dtype, cap: float | None = None, width: int = 48) -> Head:
    weight = torch.empty(5, width, dtype=dtype, device=DEVICE)
    return Head(unread, 5, None, None, weight, cap)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "masked", "cap"), [(torch.bfloat16, True, None), (torch.float32, False, 30.0)]
)
def test_the_self_test_passes(
    dtype: torch.dtype, masked: bool, cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fewer rows: the interpreter takes a second for each hundred."""
    monkeypatch.setattr(self_test, "ROWS", (20, 40))
    assert self_test.failures(head_of(dtype, cap), masked) == []


def test_no_draw_of_the_self_test_is_within_rounding() -> None:
    """Or a GPU, whose logarithms differ in their last bits, could fail for no reason."""
    for rows in self_test.ROWS:  # DiffusionGemma's width
        case = self_test._Case(head_of(torch.bfloat16, 30.0, 2816), rows)
        warm = case.temperature > 0
        logits = case._logits(case.hidden, 0, self_test.IDS)
        scaled = logits / torch.where(warm, case.temperature, 1.0)[:, None]
        assert decided(scaled, case.keys)[warm].all()


@pytest.mark.slow
def test_the_self_test_names_what_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here a kernel that takes the last of tied ids in place of the first."""
    right = self_test.head_statistics

    def wrong(*args: object, **kwargs: object) -> object:
        partials = right(*args, **kwargs)
        partials.token[partials.token < self_test.IDS - self_test.COPIED] += self_test.COPIED
        return partials

    monkeypatch.setattr(self_test, "ROWS", (20,))
    monkeypatch.setattr(self_test, "head_statistics", wrong)
    assert self_test.failures(head_of(torch.bfloat16), True) == ["head: token of 20 rows"]
