"""Logits with ties and exclusions, and statistics of whole rows of them to compare with."""

from __future__ import annotations

import torch

from vllm_dllm.ops.noise.keyed import row_keys
from vllm_dllm.ops.statistics.rows import SampledStatistics
from vllm_dllm.ops.statistics.sampled import sampled_statistics

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


def check_equal(c: dict[str, torch.Tensor], got: SampledStatistics, soft: torch.Tensor) -> None:
    """The ids of eager whole rows, and their numbers but for the order of summation."""
    want, distribution = sampled_statistics(c["logits"], c["temperature"], c["keys"])
    assert torch.equal(got.token, want.token)
    assert torch.equal(got.sample, want.sample)
    for name in ("probability", "sample_probability", "entropy"):
        mine, eager = getattr(got, name), getattr(want, name)
        torch.testing.assert_close(mine, eager, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(soft, distribution @ c["embedding"], atol=1e-5, rtol=1e-5)
