"""Ties of 16-bit logits: the kernels choose what PyTorch's operators choose, the lowest id.

So the choice of kernels changes no token. Hidden states and weights are such that sums of products
are exact in any order; what ties is decided by the rounding to bfloat16 alone.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from tests.support.ops.ranks import ThreadCollectives
from tests.support.ops.triton_statistics import (
    DEVICE,
    NATIVE,
    decided,
    random,
    rows_triton,
)
from vllm_dllm.ops.noise.keyed import row_keys
from vllm_dllm.ops.statistics.head import Head, Shard, logits_of
from vllm_dllm.ops.statistics.rows import row_statistics
from vllm_dllm.ops.statistics.tiled import tile_bytes, tiled_statistics

ROWS, WIDTH, VOCABULARY, RANKS = 10_000, 16, 300, 2
FORBIDDEN = 70
# Many rows a program, because the interpreter pays for programs.
TILE = None if NATIVE else rows_triton.Tile(1024, 128, 16, 4, 2, 1, merged_rows=1024)


def planted(cap: float | None, spread: float) -> tuple[torch.Tensor, Head]:
    """Hidden states ``[ROWS, WIDTH]`` and a head whose likeliest ids tie.

    Every id has a copy of its weights in another tile (and on another rank), or such that differ
    by less than what bfloat16 keeps of a logit. `spread` is about that of logits.
    """
    hidden = random(ROWS, WIDTH, seed=1).mul(16).round().div(16)
    weight = random(VOCABULARY, WIDTH, seed=2).mul(32 * spread / WIDTH**0.5).round().div(32)
    half = VOCABULARY // 2
    weight[half:] = weight[:half]
    weight[half::2, 0] += 1 / 32
    weight = weight.bfloat16().to(DEVICE)
    return hidden.bfloat16(), Head(logits_of(weight, 0, cap), VOCABULARY, None, None, weight, cap)


def exact(hidden: torch.Tensor, head: Head) -> torch.Tensor:
    return hidden.double() @ head.weight.double().T


def test_ties_are_planted() -> None:
    """In every row the largest logit ties, and in many another id would win without rounding."""
    hidden, head = planted(None, 30.0)
    logits = head.logits(hidden, 0, VOCABULARY)
    assert torch.equal(logits, exact(hidden, head).bfloat16().float()), "sums are exact"
    tied = (logits == logits.amax(-1, keepdim=True)).sum(-1) > 1
    assert tied.float().mean() > 0.8
    assert (exact(hidden, head).argmax(-1) != logits.argmax(-1)).float().mean() > 0.1


@pytest.mark.parametrize(("cap", "spread"), [(None, 30.0), (30.0, 10.0)])
def test_head_and_draws(cap: float | None, spread: float) -> None:
    """The greedy half of the rows, the drawn half, and whatever the tiles of the operators."""
    hidden, head = planted(cap, spread)
    keys = row_keys(torch.arange(ROWS, device=DEVICE), 5)
    temperature = (torch.arange(ROWS, device=DEVICE) % 2) * 0.75
    found = rows_triton.head_statistics(hidden, head, temperature, keys, tile=TILE)
    got = found.sampled_statistics(temperature == 0)
    logits = head.logits(hidden, 0, VOCABULARY)
    scaled = logits / torch.where(temperature == 0, 1.0, temperature)[:, None]
    # Two scores within float32 rounding may swap.
    sure = decided(scaled, keys) | (temperature == 0)
    assert sure.float().mean() > 0.999
    for ids in (64, 192, VOCABULARY):
        budget = tile_bytes(2048, ids)
        want, _ = tiled_statistics(hidden, head, temperature, keys, budget)
        assert torch.equal(got.token, want.token)
        assert torch.equal(got.token, logits.argmax(-1))
        assert torch.equal(got.sample[sure], want.sample[sure])


def test_forbidden_ids_and_rows_of_logits() -> None:
    """A masked model's statistics, by both kernels."""
    hidden, head = planted(None, 30.0)
    logits = head.logits(hidden, 0, VOCABULARY).bfloat16()
    want = row_statistics(logits.clone(), FORBIDDEN)
    found = rows_triton.head_statistics(hidden, head, forbidden=FORBIDDEN, tile=TILE)
    assert torch.equal(found.token, want.token)
    tile = rows_triton.IN_MEMORY if NATIVE else TILE
    got = rows_triton.logits_statistics(logits, FORBIDDEN, tile=tile)
    assert torch.equal(got.token, want.token)


def test_ranks() -> None:
    """The lower rank wins a tie."""
    hidden, head = planted(30.0, 10.0)
    temperature = torch.zeros(ROWS, device=DEVICE)
    width, everyone = 192, ThreadCollectives(RANKS)

    def rank(n: int) -> torch.Tensor:
        first, end = n * width, min((n + 1) * width, VOCABULARY)
        shard = Shard(first, end, width, everyone.gather, everyone.sum)
        own = replace(head, weight=head.weight[first:end], shard=shard)
        found = rows_triton.head_statistics(hidden, own, temperature, tile=TILE)
        return found.merge_ranks(shard).token

    with ThreadPoolExecutor(RANKS) as pool:
        for token in pool.map(rank, range(RANKS)):
            assert torch.equal(token, head.logits(hidden, 0, VOCABULARY).argmax(-1))
