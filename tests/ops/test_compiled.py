"""Compiled functions against the operators: the same ids, one graph for any number of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch._dynamo.utils import counters as dynamo

from tests.support.ops.statistics_cases import case, check_equal, found_by
from vllm_dllm.ops.compiled import CompiledOnce, compiled, compiling_ahead
from vllm_dllm.ops.statistics.head import Head
from vllm_dllm.ops.statistics.rows import (
    EntropyStatistics,
    SampledStatistics,
    grouped_statistics,
    row_statistics,
)
from vllm_dllm.ops.statistics.sampled import sampled_partials

pytestmark = pytest.mark.slow

LENGTH, SLOTS, VOCABULARY = 8, 5, 300


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@contextmanager
def compiled_ahead(call: Callable[[int], object]) -> Iterator[None]:
    """Compile with three rows; what is called inside must make no more graphs."""
    with compiling_ahead():
        call(3)
    made = dynamo["stats"]["unique_graphs"]
    assert made, "the compiler counts no graphs"
    yield
    assert dynamo["stats"]["unique_graphs"] == made


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


def passes(c: dict[str, torch.Tensor]) -> tuple[SampledStatistics, torch.Tensor | None]:
    head, given = Head(None, VOCABULARY, c["embedding"]), (c["temperature"], c["keys"])
    return found_by(c["logits"], head, *given, compiled(sampled_partials))


def test_passes_over_scores() -> None:
    with compiled_ahead(lambda rows: passes(case(VOCABULARY, rows=8 + rows))):
        for rows in (9, 24, 97):
            c = case(VOCABULARY, rows=rows)
            check_equal(c, *passes(c))
    # To the bit, whatever stands beside a row: else a request's tokens could depend on its
    # neighbours.
    every, _ = passes(c)
    for some in (slice(0, 32), slice(32, 64), slice(17, 49), slice(90, 97)):
        part, _ = passes({**{name: c[name][some] for name in c}, "embedding": c["embedding"]})
        for name, found in vars(part).items():
            assert torch.equal(found, getattr(every, name)[some]), (name, some)


def test_rows() -> None:
    function, forbidden = CompiledOnce(grouped_statistics), 7
    with compiled_ahead(
        lambda rows: function(case(VOCABULARY, rows=8 + rows)["logits"], forbidden)
    ):
        for rows in (1, 9, 24, 97):
            logits = case(VOCABULARY, rows=97)["logits"][:rows]
            logits[0, forbidden] = 50.0  # the likeliest, and not to be chosen
            before = logits.clone()
            got, want = function(logits, forbidden), row_statistics(before, forbidden, entropy=True)
            assert torch.equal(logits, before), "the compiled form writes nothing"
            assert torch.equal(got.token, want.token)
            assert isinstance(want, EntropyStatistics)
            for name in ("probability", "entropy"):
                mine, eager = getattr(got, name), getattr(want, name)
                torch.testing.assert_close(mine, eager, atol=4e-6, rtol=0)
