"""The kernels of row statistics and of the soft embedding against their references."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from tests.support.ops.interpreter import interpreted
from tests.support.ops.ranks import on_ranks
from vllm_dllm.ops.noise import keyed
from vllm_dllm.ops.noise.keyed import row_keys
from vllm_dllm.ops.statistics import sampled
from vllm_dllm.ops.statistics.head import Head, Shard, logits_of
from vllm_dllm.ops.statistics.row_changes import MOST_SCORE, RowChanges
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
scores = interpreted("vllm_dllm.ops.statistics.scores_triton")
filters = interpreted("vllm_dllm.ops.statistics.filters_triton")
soft_embedding = interpreted("vllm_dllm.ops.statistics.soft_embedding_triton")
KERNELS = rows_triton, scores, filters, soft_embedding
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


def rows_of(logits: torch.Tensor, cap: float | None = None) -> Any:
    """Rows of one canvas, without options."""
    return scores.LogitRows(logits, len(logits), cap)


def read(
    hidden: torch.Tensor, head: Head, temperature: torch.Tensor, keys: torch.Tensor
) -> tuple[SampledStatistics, torch.Tensor]:
    """The statistics and the soft embedding of a part of a batch, as `NoiseKernelReadout` does."""
    rows = rows_of(head.products(hidden), head.soft_cap)
    found = rows_triton.logits_statistics(rows, None, temperature, keys, head.ids.start)
    found = found.merge_ranks(head.shard)
    soft = soft_embedding.soft_embedding(rows, head, temperature, found)
    return found.sampled_statistics(temperature == 0), soft


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

    for module in KERNELS:
        if hasattr(module, "empty"):
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

    for module in KERNELS:
        for name, kernel in vars(module).items():
            if name.endswith("_kernel"):
                monkeypatch.setattr(kernel, "run", counted(name, kernel.run))
    monkeypatch.setattr(sampled, "sampled_partials", unread)
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
    found = rows_triton.logits_statistics(rows_of(logits), forbidden, tile=ROW_TILE)
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
    got, soft = read(case.hidden, case.head, temperature, keys)
    assert launches == ["rows_kernel", "merge_kernel", "weights_kernel"]
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
    """Without keys the argmax is the sample, and no logits are needed."""
    case = Product.make((5, 200, 16))
    found = rows_triton.head_statistics(case.hidden, case.head, forbidden=3, tile=TILE)
    assert launches == ["rows_kernel", "merge_kernel"]
    assert torch.equal(found.sample, found.token)
    want = row_statistics(case.eager.clone(), 3, entropy=True)
    same_rows(found.greedy_statistics(entropy=True), want)


def test_a_head_that_kernels_cannot_read_is_refused() -> None:
    case = Product.make((2, 70, 16))
    weight = case.head.weight
    for match, hidden, changes in (
        ("no weight", case.hidden, {"weight": None}),
        ("bfloat16 of width 16", case.hidden.bfloat16(), {}),
        ("of width 8", case.hidden[:, :8].contiguous(), {}),
        ("contiguous rows", case.hidden, {"weight": weight.T.contiguous().T}),
    ):
        with pytest.raises(ValueError, match=match):
            rows_triton.head_statistics(hidden, replace(case.head, **changes))
    with pytest.raises(ValueError, match="contiguous along the vocabulary"):
        rows_triton.logits_statistics(rows_of(torch.zeros(9, 4, device=DEVICE).T))


@pytest.mark.parametrize("vocabulary", [40, 3 * GROUP + 10])
def test_ranks_find_what_one_finds(vocabulary: int) -> None:
    """Shards of whole groups draw the same; with 40 ids the second rank has padding alone."""
    case, ranks = Product.make((9, vocabulary, 32)), 2
    temperature, keys = draws(9)
    width = GROUP * -(-vocabulary // (GROUP * ranks))

    def rank(shard: Shard) -> tuple[SampledStatistics, torch.Tensor]:
        # A rank's weight has rows of padding behind its ids.
        own = torch.full((width, 32), torch.nan, device=DEVICE)
        own[: max(0, shard.end - shard.first)] = case.head.weight[shard.first : shard.end]
        embedding = case.head.embedding[shard.first : shard.end]
        head = replace(case.head, weight=own, embedding=embedding, shard=shard)
        return read(case.hidden, head, temperature, keys)

    want, soft = read(case.hidden, case.head, temperature, keys)
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


def test_weights_that_float16_has_no_probabilities_for() -> None:
    case = Product.make((20, 1000, 16), torch.float16)
    even = replace(case.head, weight=torch.zeros_like(case.head.weight))
    _, soft = read(case.hidden, even, torch.ones(20, device=DEVICE), draws(20)[1])
    exact = case.head.embedding.double().mean(0).expand(20, -1)
    # Weights of 1 are exact in any dtype; what is left is the sum of a thousand float32 numbers.
    torch.testing.assert_close(soft.double(), exact, atol=1e-6, rtol=1e-6)


# ----------------------------------------------------------------------- draws


def test_a_draw_is_from_the_allowed_ids() -> None:
    """Its probability is among all ids, the forbidden one included."""
    case, forbidden = Product.make((33, 700, 32), torch.bfloat16), 300
    temperature, keys = draws(33)
    given = rows_of(case.eager.to(torch.bfloat16)), forbidden, temperature, keys
    found = rows_triton.logits_statistics(*given, tile=ROW_TILE)
    got = found.sampled_statistics(temperature == 0)
    divisor = torch.where(temperature > 0, temperature, 1.0)[:, None]
    p, rough = (case.exact / divisor.double()).softmax(-1), (case.eager / divisor).softmax(-1)
    scaled = case.eager / divisor
    scaled[:, forbidden] = -torch.inf
    want = draw(scaled, keys)
    sure = decided(scaled, keys)
    assert sure.float().mean() > 0.9
    assert torch.equal(found.sample[sure], want[sure])
    sure &= temperature > 0
    at = got.sample[sure, None]
    chosen = (t[sure].gather(1, at)[:, 0] for t in (p, rough))
    check("sample_probability", got.sample_probability[sure], *chosen)
    weight = (scaled.gather(1, found.sample[:, None])[:, 0] - scaled.amax(-1)).double().exp()
    check("weight", (found.scaled - found.best).exp(), weight, weight.float())


def test_samples_do_not_depend_on_tiles_splits_or_the_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits = Product.make((37, 1500, 32), torch.bfloat16).eager.to(torch.bfloat16)
    temperature, keys = draws(37)

    def sample(some: torch.Tensor | slice, tile: Any) -> torch.Tensor:
        given = rows_of(logits[some]), None, temperature[some], keys[some]
        return rows_triton.logits_statistics(*given, tile=tile).sample

    want = sample(slice(None), ROW_TILE)
    shuffled = torch.randperm(37, generator=torch.Generator().manual_seed(1)).to(DEVICE)[:11]
    assert torch.equal(sample(shuffled, ROW_TILE), want[shuffled])
    for share in (1, 3, 100):  # tiles of a split: from many splits to one
        monkeypatch.setattr(rows_triton, "tiles_per_split", lambda *_, share=share: share)
        assert torch.equal(sample(slice(None), replace(ROW_TILE, rows=64, ids=128)), want)


# --------------------------------------------------------------------- options


def changes_of(
    canvases: int, length: int, vocabulary: int, seed: int
) -> tuple[RowChanges, list[tuple[Any, ...]]]:
    """Random changes, and of each canvas its own: shift, ends and early, counts and penalties."""
    g = torch.Generator().manual_seed(seed)
    shift = torch.randn(canvases, vocabulary, generator=g) * 3
    shift[:, ::5] = -torch.inf
    ends = torch.rand(canvases, vocabulary, generator=g) < 0.1
    early = torch.rand(canvases, length, generator=g) < 0.5
    counts = torch.randint(0, 3, (canvases, 2, vocabulary), dtype=torch.int32, generator=g)
    counts[:, 1] = torch.minimum(*counts.unbind(1))
    penalties = torch.rand(canvases, 3, generator=g) + 0.5
    penalties[0] = torch.tensor([1e-35, 3e38, -3e38])  # the ends of what a client may ask for
    index = torch.stack([torch.randperm(canvases, generator=g) for _ in range(4)], 1).int()
    index[torch.rand(canvases, 4, generator=g) < 0.4] = -1
    tables = (t.to(DEVICE) for t in (shift, ends, early, counts, penalties))
    own = []
    for a, b, c, _ in index.tolist():
        delayed = None if b < 0 else (ends[b], early[b])
        penalised = None if c < 0 else (counts[c], penalties[c])
        own.append((None if a < 0 else shift[a], delayed, penalised))
    return RowChanges(index, index.to(DEVICE), *tables), own


def changed_by_vllm(logits: torch.Tensor, own: tuple[Any, ...]) -> torch.Tensor:
    """The scores of one canvas, ``[L, vocabulary]``, by vLLM's functions where it has them."""
    from vllm.model_executor.layers.utils import apply_penalties

    (shift, delayed, penalised), scores = own, logits.float()
    if shift is not None:
        scores = scores + shift
    if delayed is not None:
        ends, early = delayed
        scores[early[:, None] & ends] = -torch.inf
    if penalised is not None:
        (seen, times), (repetition, frequency, presence) = penalised
        ids = torch.arange(len(seen))
        output = ids.repeat_interleave(times)
        before = ids.repeat_interleave(seen - times)
        every = [t.expand(len(scores), -1) for t in (before, output)]
        numbers = [p.expand(len(scores)) for p in (presence, frequency, repetition)]
        scores = apply_penalties(scores, *every, *numbers)
    return scores


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cap", [None, 30.0])
def test_changes_are_those_of_vllm(dtype: torch.dtype, cap: float | None) -> None:
    """Each canvas gets its own, in float32 whatever the dtype of the logits."""
    canvases, length, vocabulary = 7, 3, 300
    logits = (random(canvases * length, vocabulary) * 8).to(dtype)
    changes, own = changes_of(canvases, length, vocabulary, 3)
    got = scores.LogitRows(logits, length, cap, changes=changes).whole()
    plain = logits.float() if cap is None else (logits.float() / cap).tanh() * cap
    reference = plain.clone()
    changes.apply(reference)
    wanted = [changed_by_vllm(r, o) for r, o in zip(plain.split(length), own, strict=True)]
    want = torch.cat(wanted).clamp_max(MOST_SCORE)
    want = want.where(want == -torch.inf, want.clamp_min(-MOST_SCORE))
    ruled_out = torch.cat(
        [
            changed_by_vllm(r, (shift, delayed, None)) == -torch.inf
            for r, (shift, delayed, _) in zip(plain.split(length), own, strict=True)
        ]
    )
    assert torch.equal(got == -torch.inf, ruled_out)
    for found in (got, reference):
        torch.testing.assert_close(
            found.masked_fill(ruled_out, 0),
            want.masked_fill(ruled_out, 0).clamp_min(-MOST_SCORE),
            rtol=2e-6,
            atol=2e-5 if cap else 1e-6,
        )


def test_a_bias_smaller_than_the_last_bit_of_a_logit() -> None:
    """+0.18 lifts a token that is 0.125 behind, at logits whose bfloat16 steps are 0.125."""
    logits = torch.full((4, 100), 3.0, device=DEVICE).bfloat16()
    logits[:, 7], logits[:, 9] = 17.125, 17.0
    shift = torch.zeros(1, 100, device=DEVICE)
    shift[0, 9] = 0.18
    index = torch.tensor([[0, -1, -1, -1]], dtype=torch.int32)
    none = RowChanges.none(1, DEVICE)
    changes = replace(none, on_host=index, index=index.to(DEVICE), shift=shift)
    rows = scores.LogitRows(logits, 4, changes=changes)
    assert rows_triton.logits_statistics(rows, tile=ROW_TILE).token.tolist() == [9] * 4


FILTERS = {
    "top_k": (0.0, 5, 1.0),
    "top_p": (0.0, None, 0.8),
    "min_p": (0.05, None, 1.0),
    "all": (0.01, 40, 0.9),
    "none": (0.0, None, 1.0),
    "one token": (0.0, 1, 1e-9),
    "nearly all": (1e-30, 2**40, 1 - 2**-24),
}


@pytest.mark.parametrize("dtype", DTYPES)
def test_filters_are_those_of_vllm(dtype: torch.dtype) -> None:
    """Beside changes, a forbidden id and temperatures; in each company of canvases."""
    names, length, vocabulary, forbidden = list(FILTERS), 4, 1500, 11
    count = len(names)
    logits = (random(count * length, vocabulary) * 4).to(dtype)
    changes, _ = changes_of(count, length, vocabulary, 5)
    temperature, _ = draws(len(logits))
    asked = [FILTERS[name] for name in names]
    given = (
        torch.tensor([p for p, _, _ in asked], device=DEVICE),
        torch.tensor([k or vocabulary for _, k, _ in asked], device=DEVICE),
        torch.tensor([p for _, _, p in asked], device=DEVICE),
    )
    plain = scores.LogitRows(logits, length)
    rows = filters.read_with(plain, changes, given, temperature, forbidden)
    got = rows.whole()
    exact = replace(rows, floor=None).whole()
    exact[:, forbidden] = -torch.inf
    warm = torch.where(temperature > 0, temperature, 1.0)[:, None]
    least, k, p = (each.repeat_interleave(length) for each in given)
    scaled = exact.double() / warm.double()
    scaled = scaled.masked_fill(
        scaled < scaled.amax(-1, keepdim=True) + least.double().log()[:, None], -torch.inf
    )
    want = apply_top_k_top_p(scaled.clone(), k.clamp_max(vocabulary).int(), p.double())
    allowed = exact > -torch.inf
    kept, wanted = (got > -torch.inf) & allowed, want > -torch.inf
    assert kept.any(1).all()
    # vLLM takes ties at the end of top-p's share apart, and float32 sums are off by a few bits.
    differ = kept != wanted
    last = scaled.masked_fill(~wanted, torch.inf).amin(-1, keepdim=True)
    differ &= scaled != last
    assert float((scaled.softmax(-1) * differ).sum(-1).max()) < 1e-6
    assert not differ[: length * names.index("nearly all")].any()


@pytest.mark.parametrize("drawn", [False, True])
def test_statistics_with_options_are_those_of_changed_rows(drawn: bool) -> None:
    """What kernels read on the way equals the same kernels over scores in memory."""
    canvases, length, vocabulary, forbidden = 5, 4, 700, 13
    logits = (random(canvases * length, vocabulary) * 4).bfloat16()
    changes, _ = changes_of(canvases, length, vocabulary, 9)
    temperature, keys = draws(len(logits)) if drawn else (None, None)
    few = torch.full((canvases,), 30, device=DEVICE)
    given = few * 0.0, few, few * 0.0 + 0.9
    ids, amounts = torch.arange(len(logits), device=DEVICE) * 7, random(len(logits), seed=4)
    plain = scores.LogitRows(logits, length, 30.0, added=(ids, amounts))
    rows = filters.read_with(plain, changes, given, temperature, forbidden)
    want = rows_triton.logits_statistics(
        scores.LogitRows(rows.whole(), length), forbidden, temperature, keys, tile=ROW_TILE
    )
    got = rows_triton.logits_statistics(rows, forbidden, temperature, keys, tile=ROW_TILE)
    for name, value in vars(want).items():
        assert torch.equal(getattr(got, name), value), name
    second = rows.part(slice(1, 3))
    assert torch.equal(second.whole(), rows.whole()[length : 3 * length])


@pytest.mark.parametrize("normalizes", [False, True])
def test_reports_are_those_of_scores_in_memory(normalizes: bool) -> None:
    """Of options and of ties, which count as better; more ids are listed than are read at once."""
    canvases, length, vocabulary = 5, 4, 700
    logits = (random(canvases * length, vocabulary) * 4).bfloat16()
    changes, _ = changes_of(canvases, length, vocabulary, 9)
    few = torch.full((canvases,), 300, device=DEVICE)
    given = few * 0.0, few, few * 0.0 + 0.99
    rows = filters.read_with(scores.LogitRows(logits, length, 30.0), changes, given)
    divisor = torch.tensor([1.0, 0.5, 0.8, 1.7, 0.9], device=DEVICE)
    scaled = rows.whole().double() / divisor.double().repeat_interleave(length)[:, None]
    listed = scaled.topk(40, -1).indices
    candidates = torch.stack([listed[:, n] for n in (0, 39, 7)], 1)
    found, own, ranks = scores.report(rows, divisor, listed, candidates, normalizes)
    total = scaled.logsumexp(-1, keepdim=True) if normalizes else 0.0
    for got, ids in ((found, listed), (own, candidates)):
        want = scaled.gather(1, ids) - total
        assert torch.equal(got == -torch.inf, want == -torch.inf)
        # Roundings of 2^-24 of scores up to 60, and of a sum of a few hundred weights.
        torch.testing.assert_close(got.double(), want, rtol=4e-6, atol=2e-5)
    exact = rows.whole()
    at_least = exact[:, None, :] >= exact.gather(1, candidates)[..., None]
    assert torch.equal(ranks, at_least.sum(-1).int())


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
    hidden, logits = hidden.bfloat16(), logits_of(weight, cap)
    found = logits(hidden)
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
    assert torch.equal(
        rows_triton.head_statistics(hidden, head, tile=TIES).token,
        head.logits(hidden).argmax(-1),
    )
    given = rows_of(head.products(hidden), cap), None, temperature, keys
    tile = rows_triton.IN_MEMORY if NATIVE else TIES
    got = rows_triton.logits_statistics(*given, tile=tile).sampled_statistics(temperature == 0)
    logits = head.logits(hidden)
    scaled = logits / torch.where(temperature == 0, 1.0, temperature)[:, None]
    # Two scores within float32 rounding may swap.
    sure = decided(scaled, keys) | (temperature == 0)
    assert sure.float().mean() > 0.998
    want, _ = sampled.sampled_partials(
        logits, temperature, keys, group_starts(0, logits.shape[1], DEVICE)
    )
    want = want.sampled_statistics(temperature == 0)
    assert torch.equal(got.token, want.token)
    assert torch.equal(got.token, logits.argmax(-1))
    assert torch.equal(got.sample[sure], want.sample[sure])


@pytest.mark.slow
def test_ties_with_a_forbidden_id_and_on_ranks() -> None:
    """A masked model's statistics by both kernels; the lower rank wins a tie."""
    forbidden = 70
    hidden, head = planted(None, 30.0)
    logits = head.logits(hidden).bfloat16()
    want = row_statistics(logits.clone(), forbidden)
    found = rows_triton.head_statistics(hidden, head, forbidden=forbidden, tile=TIES)
    assert torch.equal(found.token, want.token)
    tile = rows_triton.IN_MEMORY if NATIVE else TIES
    got = rows_triton.logits_statistics(rows_of(logits), forbidden, tile=tile)
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
    monkeypatch.setattr(self_test, "TILE_ROWS", (20, 40))
    assert self_test.failures(head_of(dtype, cap), masked) == []


def test_no_draw_of_the_self_test_is_within_rounding() -> None:
    """Or a GPU, whose logarithms differ in their last bits, could fail for no reason."""
    for rows in self_test.TILE_ROWS:  # DiffusionGemma's width
        case = self_test._Case(head_of(torch.bfloat16, 30.0, 2816), rows)
        warm = case.temperature > 0
        scaled = case.scores / torch.where(warm, case.temperature, 1.0)[:, None]
        assert decided(scaled, case.keys)[warm].all()


@pytest.mark.slow
def test_the_self_test_names_what_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here a kernel that takes the last of tied ids in place of the first."""
    right = self_test.head_statistics

    def wrong(*args: object, **kwargs: object) -> object:
        partials = right(*args, **kwargs)
        partials.token[partials.token < self_test.IDS - self_test.COPIED] += self_test.COPIED
        return partials

    monkeypatch.setattr(self_test, "TILE_ROWS", (20,))
    monkeypatch.setattr(self_test, "head_statistics", wrong)
    assert self_test.failures(head_of(torch.bfloat16), True) == ["head: token of 20 rows"]
