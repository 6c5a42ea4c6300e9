"""Samples of the kernels: independent of how the work is divided, and of the right distribution."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from tests.support.children.compile_child import ROOT
from tests.support.ops.chi_square import chi_square, limit
from tests.support.ops.triton_statistics import (
    DEVICE,
    NATIVE,
    TILE,
    Product,
    draws,
    random,
    rows_triton,
    unread,
)
from vllm_dllm.ops.noise.keyed import row_keys
from vllm_dllm.ops.statistics.groups import GROUP
from vllm_dllm.ops.statistics.head import Head

pytestmark = [pytest.mark.usefixtures("garbage_before_kernels"), pytest.mark.slow]


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


@pytest.mark.parametrize("vocabulary", [40, 3 * GROUP + 10])
def test_samples_follow_the_distribution(vocabulary: int) -> None:
    """Through a temperature, and across groups; the same keys draw the same."""
    rows, width = 20_000, 16
    keys = row_keys(torch.arange(rows, device=DEVICE), 9)
    hidden = torch.ones(1, width, device=DEVICE)
    weight = random(vocabulary, width, seed=4) / 2
    tile = None if NATIVE else replace(TILE, rows=1024, depth=width, merged_rows=512)
    head = Head(unread, vocabulary, weight=weight)

    def sample(keys: torch.Tensor) -> torch.Tensor:
        same = hidden.repeat(len(keys), 1)
        temperature = torch.full((len(keys),), 0.8, device=DEVICE)
        return rows_triton.head_statistics(same, head, temperature, keys, tile=tile).sample

    found = sample(keys)
    assert torch.equal(found[-600:], sample(keys[-600:]))
    expected = (hidden @ weight.T / 0.8)[0].softmax(-1)
    # Rare tokens together: a chi-square wants some counts in every class.
    rare = expected * rows < 10
    classes = torch.where(rare, 0, torch.cumsum(~rare, 0))
    merged = torch.zeros(int(classes.max()) + 1, device=DEVICE).index_add_(0, classes, expected)
    assert chi_square(classes[found].cpu(), merged.cpu()) < limit(len(merged))


def test_work_is_spread_over_the_multiprocessors() -> None:
    """Few rows are split as often as there are places; many rows fill whole waves."""
    for row_tiles, tiles, slots in (
        (1, 1228, 264),
        (2, 2048, 132),
        (32, 2048, 132),
        (8, 2048, 132),
    ):
        share = rows_triton.tiles_per_split(row_tiles, tiles, slots)
        programs = row_tiles * -(-tiles // share)
        waves = -(-programs // slots)
        assert -(-tiles // share) <= rows_triton.MAX_SPLITS
        # The time of the waves over that of a perfect division.
        assert waves * slots * share < 1.15 * row_tiles * tiles, (row_tiles, tiles, slots)
    assert rows_triton.tiles_per_split(1, 10_000, 10_000) * rows_triton.MAX_SPLITS >= 10_000


@pytest.mark.skipif(NATIVE, reason="interprets nothing")
def test_interpreting_leaves_nothing_behind() -> None:
    """Other tests' Triton, and the module that others import, are native afterwards."""
    code = """
import sys, torch, triton.language as tl
from triton.runtime.jit import JITFunction
from tests.support.ops.interpreter import interpreted
places = tl, tl.core, tl.standard, tl.math, tl.tensor, tl.dtype, JITFunction
before = [dict(vars(place)) for place in places]
copy = interpreted("vllm_dllm.ops.statistics.rows_triton")
copy.logits_statistics(torch.randn(2, 70))
for place, attributes in zip(places, before):
    for name, value in attributes.items():
        assert vars(place)[name] is value, (place, name)
from vllm_dllm.ops.statistics import rows_triton as native
assert native is not copy and sys.modules["vllm_dllm.ops.statistics.rows_triton"] is native
assert isinstance(native.rows_kernel, JITFunction) and isinstance(native.fold, JITFunction)
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
