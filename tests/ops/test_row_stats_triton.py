"""The kernels of row statistics against their references; interpreted where there is no GPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest
import torch

from tests.ops.compile_child import ROOT
from tests.ops.interpreter import interpreted
from tests.ops.test_noise import chi_square, limit
from tests.ops.test_sampled_stats import Meeting
from vllm_dllm.ops.noise import keyed as noise
from vllm_dllm.ops.noise.keyed import row_keys
from vllm_dllm.ops.statistics import tiled as tiled_stats
from vllm_dllm.ops.statistics.head import Head, Shard
from vllm_dllm.ops.statistics.launch_triton import MeasuredStatistics
from vllm_dllm.ops.statistics.rows import row_statistics
from vllm_dllm.ops.statistics.sampled import (
    FIRST_GROUP_INDEX,
    GROUP,
    draw,
    group_noise,
    group_starts,
    grouped,
    sampled_statistics,
    take_group,
)

NOISE = interpreted("tests.ops.draw_noise_triton")
LAUNCH = interpreted("vllm_dllm.ops.statistics.launch_triton")
ROWS = interpreted("vllm_dllm.ops.statistics.rows_triton")
HEADS = interpreted("vllm_dllm.ops.statistics.head_triton")
SOFT = interpreted("vllm_dllm.ops.statistics.soft_embedding_triton")
NATIVE = torch.cuda.is_available()
DEVICE = torch.device("cuda" if NATIVE else "cpu")
# Scores are sums of a few float32 numbers below 100; what is closer than this may swap.
CLOSE = 1e-4
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Many rows a program, because the interpreter pays for programs; natively the defaults.
ROW_TILE = ROWS.RowTile(rows=32, ids=256, draw_rows=64)
TILE = HEADS.HeadTile(
    rows=32, ids=128, depth=32, warps=4, stages=2, resident=1, draw_rows=1 if NATIVE else 64
)


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel writes holds garbage before, so that what it leaves out is seen."""

    def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        value = float("nan") if dtype.is_floating_point else 987_654_321
        return torch.full(tuple(shape), value, dtype=dtype, device=device)

    for module in (LAUNCH, SOFT):
        monkeypatch.setattr(module, "empty", poisoned)


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
    inside = take_group(groups, chosen) + noise.gumbel(keys, ids)
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
    got: MeasuredStatistics,
    exact: torch.Tensor,
    eager: torch.Tensor,
    temperature: torch.Tensor,
    keys: torch.Tensor,
    cap: float | None = None,
) -> None:
    """Statistics against those of logits in float64 and of logits in eager float32."""
    greedy = temperature == 0
    divisor = torch.where(greedy, 1.0, temperature)[:, None]
    # A capped logit is off by as much as `head_triton.capped` states, and so are two.
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
    check("log_sum_exp", got.log_sum_exp, exact.logsumexp(-1), eager.logsumexp(-1), slack)


def test_noise_is_that_of_the_reference() -> None:
    """Uniform numbers bit for bit; Gumbel noise within what `keyed_triton.gumbel` states."""
    keys = row_keys(torch.arange(6, device=DEVICE), 5)
    out = torch.full((2, 6, 4096), torch.nan, device=DEVICE)
    for first in (0, FIRST_GROUP_INDEX + 12_345):
        NOISE.noise_kernel[(6,)](keys, first, out, COUNT=4096)
        index = torch.arange(first, first + 4096, device=DEVICE)
        u = noise.uniform(keys, index)
        assert torch.equal(out[0], u)
        exact = -(-torch.log1p(-u.double())).log()
        assert ((out[1] - exact).abs() <= 1e-6 + 2e-7 * exact.abs()).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "vocabulary"), [(1, 7), (31, 300), (33, 1000), (63, 64), (129, 2049)]
)
def test_rows_of_logits(dtype: torch.dtype, rows: int, vocabulary: int) -> None:
    """Rows that lie apart, from an odd address on, between columns that must not be read."""
    wide = torch.full((rows, vocabulary + 9), torch.nan, dtype=dtype, device=DEVICE)
    logits = wide[:, 3 : vocabulary + 3]
    logits.copy_(random(rows, vocabulary) * 5)
    logits[0, vocabulary // 2 :] = -torch.inf
    temperature, keys = draws(rows)
    before = logits.clone()
    got = ROWS.measured_statistics(logits, temperature, keys, tile=ROW_TILE)
    assert torch.equal(logits, before)
    # Where logits are few, more of them tie.
    check_all(got, logits.double(), logits.float(), temperature, keys)
    want, _ = sampled_statistics(logits, temperature, keys)
    raw_is_first = torch.equal(want.token, logits.float().argmax(-1))
    assert torch.equal(got.token, want.token) or not raw_is_first


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_forbidden_id_counts_but_is_not_chosen(dtype: torch.dtype) -> None:
    rows, vocabulary, forbidden = 33, 700, 300
    logits = (random(rows, vocabulary) * 4).to(dtype)
    logits[:9, forbidden] = 90.0  # by far the largest
    logits[9, forbidden] = -torch.inf
    logits[10, ::2] = -torch.inf
    logits[11] = 2.0  # all tied
    logits[12, 1:] = -torch.inf
    temperature, keys = draws(rows)
    got = ROWS.measured_statistics(logits, None, None, forbidden, ROW_TILE)
    want = row_statistics(logits.clone(), forbidden, entropy=True)
    assert torch.equal(got.token, want.token)
    assert torch.equal(got.sample, want.token)
    p = logits.double().softmax(-1)
    check("probability", got.probability, p.gather(1, want.token[:, None])[:, 0], want.probability)
    check("entropy", got.entropy, -torch.xlogy(p, p).sum(-1), want.entropy)
    # A draw is from the others, its probability among all.
    got = ROWS.measured_statistics(logits, temperature, keys, forbidden, ROW_TILE)
    scaled = logits.float() / torch.where(temperature > 0, temperature, 1.0)[:, None]
    p = scaled.double().softmax(-1)
    scaled[:, forbidden] = -torch.inf
    sure = decided(scaled, keys) & (temperature > 0)
    assert torch.equal(got.sample[sure], draw(scaled, keys)[sure])
    assert (got.sample != forbidden).all()
    exact = p.gather(1, got.sample[:, None])[:, 0]
    check("sample", got.sample_probability[sure], exact[sure], exact[sure].float())


def test_ties_go_to_the_lowest_id() -> None:
    """Across groups, tiles and splits, and in the head as in logits."""
    for first in (0, 5, 64, 255, 256, 900):
        logits = torch.zeros(3, 1000, device=DEVICE)
        logits[:, first::7] = 3.0
        assert ROWS.measured_statistics(logits, tile=ROW_TILE).token.tolist() == [first] * 3
        hidden = torch.ones(3, 16, device=DEVICE)
        head = Head(unread, 1000, weight=logits[:1].T.repeat(1, 16).contiguous())
        assert HEADS.head_statistics(hidden, head, tile=TILE).token.tolist() == [first] * 3


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
        hidden = random(rows, width, seed=1).to(dtype)
        weight = (random(vocabulary, width, seed=2) * 5 / width**0.5).to(dtype)
        embedding = random(vocabulary, 40, seed=3).to(dtype)
        exact, eager = hidden.double() @ weight.double().T, hidden.float() @ weight.float().T
        if cap is not None:
            exact, eager = (x.div(cap).tanh() * cap for x in (exact, eager))
        return cls(hidden, Head(unread, vocabulary, embedding, None, weight, cap), exact, eager)


@pytest.mark.parametrize(
    ("dtype", "sizes", "cap"),
    [
        (torch.float32, (1, 7, 16), None),
        (torch.float32, (33, 1000, 40), 8.0),
        (torch.float32, (63, 257, 32), None),
        (torch.bfloat16, (1, 300, 64), 8.0),
        (torch.bfloat16, (31, 100, 48), None),
        (torch.bfloat16, (129, 1000, 64), 30.0),
        (torch.float16, (33, 449, 40), 8.0),
    ],
)
def test_heads_and_soft_embeddings(
    dtype: torch.dtype, sizes: tuple[int, int, int], cap: float | None, launches: list[str]
) -> None:
    case = Product.make(sizes, dtype, cap)
    temperature, keys = draws(sizes[0])
    got, soft = SOFT.fused_statistics(case.hidden, case.head, temperature, keys, 1 << 15)
    assert {"head_kernel", "head_draw_kernel", "weights_kernel", "sum_kernel"} <= set(launches)
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


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that ran; the reference must not."""
    found: list[str] = []
    for module in (ROWS, HEADS, SOFT):
        for name, kernel in vars(module).items():
            if name.endswith("_kernel"):
                run = counted(name, kernel.run, found)
                monkeypatch.setattr(kernel, "run", run)
    for name in ("tiled_statistics", "_Running"):
        monkeypatch.setattr(tiled_stats, name, unread)
    return found


def counted(name: str, run: Callable[..., object], found: list[str]) -> Callable[..., object]:
    def count(*args: object, **kwargs: object) -> object:
        found.append(name)
        return run(*args, **kwargs)

    return count


def test_only_what_is_wanted_is_computed(launches: list[str]) -> None:
    """No embedding, no second pass; no keys, the argmax is the sample."""
    case = Product.make((5, 200, 16))
    temperature, keys = draws(5)
    head = replace(case.head, embedding=None)
    assert SOFT.fused_statistics(case.hidden, head, temperature, keys, 1)[1] is None
    assert launches == ["head_kernel", "head_draw_kernel"]
    found = HEADS.head_statistics(case.hidden, head, forbidden=3, tile=TILE)
    assert torch.equal(found.sample, found.token)
    want = row_statistics(case.eager.clone(), 3, entropy=True)
    got = LAUNCH.measured(found, torch.zeros((), dtype=torch.bool, device=DEVICE))
    assert torch.equal(got.token, want.token)
    torch.testing.assert_close(got.probability, want.probability, atol=4e-6, rtol=0)
    torch.testing.assert_close(got.entropy, want.entropy, atol=4e-6, rtol=0)


def test_a_head_that_kernels_cannot_read_is_refused() -> None:
    case = Product.make((2, 70, 16))
    temperature, keys = draws(2)

    def refused(match: str, hidden: torch.Tensor, **changes: object) -> None:
        with pytest.raises(ValueError, match=match):
            SOFT.fused_statistics(hidden, replace(case.head, **changes), temperature, keys, 1)

    refused("no weight", case.hidden, weight=None)
    refused("bfloat16 of width 16", case.hidden.bfloat16())
    refused("of width 8", case.hidden[:, :8].contiguous())
    refused("contiguous rows", case.hidden, weight=case.head.weight.T.contiguous().T)
    refused("contiguous rows", case.hidden, embedding=case.head.embedding.T.contiguous().T)
    with pytest.raises(ValueError, match="no embedding"):
        head = replace(case.head, embedding=None)
        found = HEADS.head_statistics(case.hidden, case.head)
        SOFT.soft_embedding(case.hidden, head, temperature, found, 1)
    with pytest.raises(ValueError, match="contiguous along the vocabulary"):
        ROWS.measured_statistics(torch.zeros(9, 4, device=DEVICE).T)


def test_samples_do_not_depend_on_tiles_splits_or_the_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Product.make((37, 1500, 32), torch.bfloat16)
    logits = case.eager
    temperature, keys = draws(37)
    many = ROWS.RowTile(rows=4, ids=64, draw_rows=16)
    one = ROWS.RowTile(rows=64, ids=2048, draw_rows=64)
    want = ROWS.measured_statistics(logits, temperature, keys, tile=ROW_TILE).sample
    for tile in (many, one):
        assert torch.equal(
            ROWS.measured_statistics(logits, temperature, keys, tile=tile).sample, want
        )
    shuffled = torch.randperm(37, generator=torch.Generator().manual_seed(1)).to(DEVICE)[:11]
    some = temperature[shuffled], keys[shuffled]
    got = ROWS.measured_statistics(logits[shuffled], *some, tile=ROW_TILE)
    assert torch.equal(got.sample, want[shuffled])

    want = HEADS.head_statistics(case.hidden, case.head, temperature, keys, tile=TILE).sample
    got = HEADS.head_statistics(case.hidden[shuffled], case.head, *some, tile=TILE)
    assert torch.equal(got.sample, want[shuffled])
    wide = replace(TILE, rows=64, ids=256, depth=16)
    for share in (1, 3, 100):  # tiles of a split: from many splits to one
        monkeypatch.setattr(LAUNCH, "tiles_per_split", lambda *_, share=share: share)
        got = HEADS.head_statistics(case.hidden, case.head, temperature, keys, tile=wide)
        assert torch.equal(got.sample, want)


@pytest.mark.parametrize("vocabulary", [40, 3 * GROUP + 10])
@pytest.mark.parametrize("fused", [False, True])
def test_samples_follow_the_distribution(vocabulary: int, fused: bool) -> None:
    """Through a temperature, and across groups; the same keys draw the same."""
    rows, width = 20_000, 16
    temperature = torch.full((rows,), 0.8, device=DEVICE)
    keys = row_keys(torch.arange(rows, device=DEVICE), 9)
    hidden = torch.ones(1, width, device=DEVICE)
    weight = random(vocabulary, width, seed=4) / 2
    logits = hidden @ weight.T
    if fused:
        tile = None if NATIVE else replace(TILE, rows=1024, depth=width, draw_rows=512)
        head = Head(unread, vocabulary, weight=weight)

        def sample(keys: torch.Tensor) -> torch.Tensor:
            same = hidden.repeat(len(keys), 1)
            some = temperature[: len(keys)]
            return HEADS.head_statistics(same, head, some, keys, tile=tile).sample
    else:
        tile = None if NATIVE else ROWS.RowTile(rows=512, ids=256, draw_rows=512)

        def sample(keys: torch.Tensor) -> torch.Tensor:
            same = logits.expand(len(keys), -1)
            return ROWS.measured_statistics(same, temperature[: len(keys)], keys, tile=tile).sample

    found = sample(keys)
    assert torch.equal(found[-600:], sample(keys[-600:]))
    expected = (logits[0] / 0.8).softmax(-1)
    # Rare tokens together: a chi-square wants some counts in every class.
    rare = expected * rows < 10
    classes = torch.where(rare, 0, torch.cumsum(~rare, 0))
    merged = torch.zeros(int(classes.max()) + 1, device=DEVICE).index_add_(0, classes, expected)
    assert chi_square(classes[found].cpu(), merged.cpu()) < limit(len(merged))


@pytest.mark.parametrize("vocabulary", [40, 3 * GROUP + 10, 500])
def test_ranks_find_what_one_finds(vocabulary: int) -> None:
    """Shards of whole groups draw the same; with 40 ids the second rank has padding alone."""
    case, ranks = Product.make((9, vocabulary, 32)), 2
    temperature, keys = draws(9)
    width = GROUP * -(-vocabulary // (GROUP * ranks))
    everyone = Meeting(ranks)

    def rank(n: int) -> tuple[MeasuredStatistics, torch.Tensor]:
        first, end = n * width, min((n + 1) * width, vocabulary)
        # A rank's weight has rows of padding behind its ids.
        own = torch.full((width, 32), torch.nan, device=DEVICE)
        own[: max(0, end - first)] = case.head.weight[first:end]
        shard = Shard(first, end, width, everyone.gather, everyone.sum)
        embedding = case.head.embedding[first:end]
        head = replace(case.head, weight=own, embedding=embedding, shard=shard)
        return SOFT.fused_statistics(case.hidden, head, temperature, keys, 1 << 16)

    with ThreadPoolExecutor(ranks) as pool:
        results = list(pool.map(rank, range(ranks)))
    want, soft = SOFT.fused_statistics(case.hidden, case.head, temperature, keys, 1 << 16)
    for got, got_soft in results:
        assert torch.equal(got.token, want.token)
        assert torch.equal(got.sample, want.sample)
        check_all(got, case.exact, case.eager, temperature, keys)
        torch.testing.assert_close(got_soft, soft, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("budget", [1, 40_000, 1 << 20])
def test_the_workspace_keeps_to_its_budget(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with several parts of a sum, and with weights of which float16 has no probabilities."""
    case = Product.make((20, 1000, 16), torch.float16)
    even = replace(case.head, weight=torch.zeros_like(case.head.weight))
    temperature, keys = torch.ones(20, device=DEVICE), draws(20)[1]
    taken: list[int] = []
    poisoned = SOFT.empty

    def watched(*args: object) -> torch.Tensor:
        found = poisoned(*args)
        taken.append(found.nbytes)
        return found

    monkeypatch.setattr(SOFT, "empty", watched)
    found = HEADS.head_statistics(case.hidden, even, temperature, keys)
    soft = SOFT.soft_embedding(case.hidden, even, temperature, found, budget)
    assert len(taken) == 1
    assert taken[0] <= max(budget, 20 * 128 * 2)
    exact = case.head.embedding.double().mean(0).expand(20, -1)
    # Weights of 1 are exact in any dtype; what is left is the sum of a thousand float32 numbers.
    torch.testing.assert_close(soft.double(), exact, atol=1e-6, rtol=1e-6)


def test_work_is_spread_over_the_multiprocessors() -> None:
    """Few rows are split as often as there are places; many rows fill whole waves."""
    for row_tiles, tiles, slots in (
        (1, 1228, 264),
        (2, 2048, 132),
        (32, 2048, 132),
        (8, 2048, 132),
    ):
        share = LAUNCH.tiles_per_split(row_tiles, tiles, slots)
        programs = row_tiles * -(-tiles // share)
        waves = -(-programs // slots)
        assert -(-tiles // share) <= LAUNCH.MAX_SPLITS
        # The time of the waves over that of a perfect division.
        assert waves * slots * share < 1.15 * row_tiles * tiles, (row_tiles, tiles, slots)
    assert LAUNCH.tiles_per_split(1, 10_000, 10_000) * LAUNCH.MAX_SPLITS >= 10_000


@pytest.mark.skipif(NATIVE, reason="interprets nothing")
def test_interpreting_leaves_nothing_behind() -> None:
    """Other tests' Triton, and the module that others import, are native afterwards."""
    code = """
import sys, torch, triton.language as tl
from triton.runtime.jit import JITFunction
from tests.ops.interpreter import interpreted
places = tl, tl.core, tl.standard, tl.math, tl.tensor, tl.dtype, JITFunction
before = [dict(vars(place)) for place in places]
copy = interpreted("vllm_dllm.ops.statistics.rows_triton")
copy.measured_statistics(torch.randn(2, 70), tile=copy.RowTile(ids=64))
for place, attributes in zip(places, before):
    for name, value in attributes.items():
        assert vars(place)[name] is value, (place, name)
from vllm_dllm.ops.statistics import rows_triton as native
assert native is not copy and sys.modules["vllm_dllm.ops.statistics.rows_triton"] is native
assert isinstance(native.rows_kernel, JITFunction) and isinstance(native.fold, JITFunction)
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
