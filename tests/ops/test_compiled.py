"""Compiled functions against the operators: the same ids, one graph for any number of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch._dynamo.utils import counters as dynamo

from tests.ops.test_sampled_stats import case, in_float64
from vllm_dllm.ops.compiled import CompiledOnce, compiled, compiling_ahead
from vllm_dllm.ops.noise.keyed import Counters, candidate_keys, row_keys, step_noise
from vllm_dllm.ops.statistics import tiled as tiled_stats
from vllm_dllm.ops.statistics.groups import GROUP
from vllm_dllm.ops.statistics.head import Head
from vllm_dllm.ops.statistics.rows import EntropyStatistics, grouped_statistics, row_statistics
from vllm_dllm.ops.statistics.sampled import draw, sampled_statistics

pytestmark = pytest.mark.slow

LENGTH, SLOTS, EXAMPLES = 8, 5, 3


def graphs() -> int:
    """How many the compiler has made in this process."""
    count = int(dynamo["stats"]["unique_graphs"])
    assert count, "the compiler counts no graphs"
    return count


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def ahead(call: Callable[[int], object]) -> None:
    """Compile with `EXAMPLES` rows; what follows must make no more graphs."""
    with compiling_ahead():
        call(EXAMPLES)


def counters(canvases: int) -> Counters:
    g = torch.Generator().manual_seed(canvases)
    slots = torch.randint(SLOTS, (canvases,), generator=g)
    return Counters(
        seed=torch.randint(-(1 << 62), 1 << 62, (SLOTS,), generator=g),
        start=torch.arange(SLOTS) * 96 + 7,
        step=torch.arange(SLOTS, dtype=torch.int32),
        slot=slots.repeat_interleave(LENGTH),
        length=LENGTH,
    )


def test_each_compiles_code_of_its_own() -> None:
    """Two engines of a process have the same function, for other dtypes and with other options."""

    def scaled(rows: torch.Tensor, *, by: int = 2) -> torch.Tensor:
        return rows * by + offset

    offset = 3
    first, second = CompiledOnce(scaled), CompiledOnce(scaled)
    for rows in (4, 1, 7):
        whole = torch.arange(2 * rows).view(rows, 2)
        assert torch.equal(first(whole), scaled(whole))
        assert torch.equal(second(whole.double(), by=5), scaled(whole.double(), by=5))


def test_noise() -> None:
    noise, keys = compiled(step_noise), compiled(candidate_keys)
    ahead(lambda rows: (noise(counters(1), 300), keys(counters(1))))
    made = graphs()
    for canvases in (1, 2, 5, 40):
        of = counters(canvases)
        got, want = noise(of, 300), step_noise(of, 300)
        assert torch.equal(got.keys, want.keys)
        assert torch.equal(keys(of), want.keys)
        assert torch.equal(got.renoise, want.renoise)
        assert torch.equal(got.fresh, want.fresh)
    assert graphs() == made


# One tile; tiles of two groups; a narrower last tile, which is not compiled.
@pytest.mark.parametrize(
    ("vocabulary", "ids"),
    [(300, 128), *(pytest.param(*s, marks=pytest.mark.long) for s in ((300, 320), (512, 128)))],
)
def test_tiles(vocabulary: int, ids: int) -> None:
    def run(rows: int) -> tuple:
        c = case(vocabulary, rows=rows)
        index = torch.arange(rows)[:, None]
        head = Head(
            lambda hidden, first, end: c["logits"][hidden[:, 0], first:end],
            vocabulary,
            c["embedding"],
        )
        budget = tiled_stats.tile_bytes(rows, ids)
        rows_of = index, head, c["temperature"], c["keys"], budget
        return c, *tiled_stats.tiled_statistics(*rows_of, compile=True)

    ahead(lambda rows: run(8 + rows))
    made = graphs()
    for rows in (9, 24, 97):
        c, got, soft = run(rows)
        want, distribution = sampled_statistics(c["logits"], c["temperature"], c["keys"])
        assert torch.equal(got.token, want.token)
        assert torch.equal(got.sample, want.sample)
        # The budget of `test_tiles_equal_whole_rows`.
        exact_p, exact_h, exact_soft = in_float64(c)
        top = exact_p.gather(1, want.token[:, None])[:, 0]
        for mine, eager, exact in (
            (got.entropy, want.entropy, exact_h),
            (soft, distribution @ c["embedding"], exact_soft),
            (got.probability, want.probability, top),
        ):
            budget = 3 * (eager.double() - exact).abs().max() + 4e-6
            assert (mine.double() - exact).abs().max() <= budget
    assert graphs() == made


def test_a_row_is_computed_alike_whatever_stands_beside_it() -> None:
    """To the bit: else a request's tokens could depend on its neighbours."""
    weight = torch.randn(300, 16, generator=torch.Generator().manual_seed(1))
    head = Head(lambda hidden, first, end: hidden[:, first:end].clone(), 300, weight)
    c = case(300, rows=96)

    def run(some: slice) -> tiled_stats.Result:
        rows = c["logits"][some], c["temperature"][some], c["keys"][some]
        budget = tiled_stats.tile_bytes(len(rows[0]), 320)
        return tiled_stats.tiled_statistics(rows[0], head, *rows[1:], budget, compile=True)

    every, _ = run(slice(0, 96))
    for some in (slice(0, 32), slice(32, 64), slice(17, 49), slice(90, 96)):
        part, _ = run(some)
        for name in ("token", "sample", "probability", "sample_probability", "entropy"):
            assert torch.equal(getattr(part, name), getattr(every, name)[some]), (name, some)


def test_rows() -> None:
    function, forbidden = CompiledOnce(grouped_statistics), 7
    ahead(lambda rows: function(case(300, rows=8 + rows)["logits"], forbidden))
    made = graphs()
    for rows in (1, 9, 24, 97):
        logits = case(300, rows=97)["logits"][:rows]
        logits[0, forbidden] = 50.0  # the likeliest, and not to be chosen
        before = logits.clone()
        got, want = function(logits, forbidden), row_statistics(before, forbidden, entropy=True)
        assert torch.equal(logits, before), "the compiled form writes nothing"
        assert torch.equal(got.token, want.token)
        exact = logits.double().softmax(-1)
        top = exact.gather(1, want.token[:, None])[:, 0]
        budget = 3 * (want.probability.double() - top).abs().max() + 4e-6
        assert (got.probability.double() - top).abs().max() <= budget
        assert isinstance(got, EntropyStatistics)
        assert isinstance(want, EntropyStatistics)
        exact_h = -torch.xlogy(exact, exact).sum(-1)
        budget = 3 * (want.entropy.double() - exact_h).abs().max() + 4e-6
        assert (got.entropy.double() - exact_h).abs().max() <= budget
    assert graphs() == made


@pytest.mark.parametrize("vocabulary", [300, pytest.param(5 * GROUP, marks=pytest.mark.long)])
def test_draws(vocabulary: int) -> None:
    function = CompiledOnce(draw)
    ahead(lambda rows: function(torch.zeros(rows, vocabulary), torch.arange(rows)))
    made = graphs()
    for rows in (1, 2, 96):
        logits, keys = case(vocabulary, rows=96)["logits"][:rows], row_keys(torch.arange(rows), 5)
        assert torch.equal(function(logits, keys), draw(logits, keys))
    assert graphs() == made
