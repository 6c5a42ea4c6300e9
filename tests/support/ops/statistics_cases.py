"""Logits with ties and exclusions, and statistics of whole rows of them to compare with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vllm_dllm.ops.noise.keyed import row_keys
from vllm_dllm.ops.statistics.head import Head
from vllm_dllm.ops.statistics.partials import SoftmaxPartials
from vllm_dllm.ops.statistics.rows import SampledStatistics, group_starts
from vllm_dllm.ops.statistics.sampled import draw, sampled_partials, soft_embedding

HIDDEN = 16


def sampled_statistics(
    logits: torch.Tensor, temperature: torch.Tensor, keys: torch.Tensor
) -> tuple[SampledStatistics, torch.Tensor]:
    """The reference: statistics ``[rows]``, and probabilities at a temperature, float32."""
    greedy = temperature == 0
    scaled = logits.float() / torch.where(greedy, 1.0, temperature)[:, None]
    token = scaled.argmax(-1)
    sample = torch.where(greedy, token, draw(scaled, keys))
    probability = scaled.softmax(-1)
    certain = torch.nn.functional.one_hot(token, logits.shape[-1]).float()
    probability = torch.where(greedy[:, None], certain, probability)
    entropy = -torch.xlogy(probability, probability).sum(-1)
    pick = [probability.gather(1, ids[:, None])[:, 0] for ids in (token, sample)]
    return SampledStatistics(token, pick[0], sample, pick[1], entropy), probability


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


def found_by(
    scores: torch.Tensor,
    head: Head,
    temperature: torch.Tensor,
    keys: torch.Tensor,
    pass_over: Callable[..., Any] = sampled_partials,
) -> tuple[SampledStatistics, torch.Tensor | None]:
    """What the readout makes of this rank's scores."""
    found, weight = SoftmaxPartials.empty(len(scores), scores.device), scores
    if scores.shape[1]:
        first = head.ids.start
        starts = group_starts(first, first + scores.shape[1], scores.device)
        found, weight = pass_over(scores, temperature, keys, starts)
    merged = found.merge_ranks(head.shard)
    statistics = merged.sampled_statistics(temperature == 0)
    if head.embedding is None:
        return statistics, None
    return statistics, soft_embedding(weight, head, temperature, found, merged)


def check_equal(c: dict[str, torch.Tensor], got: SampledStatistics, soft: torch.Tensor) -> None:
    """The ids of eager whole rows, and their numbers but for the order of summation."""
    want, distribution = sampled_statistics(c["logits"], c["temperature"], c["keys"])
    assert torch.equal(got.token, want.token)
    assert torch.equal(got.sample, want.sample)
    for name in ("probability", "sample_probability", "entropy"):
        mine, eager = getattr(got, name), getattr(want, name)
        torch.testing.assert_close(mine, eager, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(soft, distribution @ c["embedding"], atol=1e-5, rtol=1e-5)
