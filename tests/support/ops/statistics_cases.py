"""Logits with ties and exclusions, and the error budget of statistics that are drawn from them."""

from __future__ import annotations

import torch

from vllm_dllm.ops.noise.keyed import row_keys
from vllm_dllm.ops.statistics.rows import SampledStatistics

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


def check_against_float64(
    c: dict[str, torch.Tensor],
    got: SampledStatistics,
    soft: torch.Tensor,
    want: SampledStatistics,
    distribution: torch.Tensor,
) -> None:
    """The ids of eager whole rows, and numbers within a budget from float64.

    The budget is what eager float32 on whole rows (`want` and its distribution) loses against
    float64, and twice that for the other order of summation; at least a few units in the last
    place.
    """
    assert torch.equal(got.token, want.token)
    assert torch.equal(got.sample, want.sample)
    greedy = c["temperature"] == 0
    scaled = c["logits"].double() / torch.where(greedy, 1e-9, c["temperature"].double())[:, None]
    first = torch.nn.functional.one_hot(c["logits"].argmax(-1), scaled.shape[1]).double()
    p = torch.where(greedy[:, None], first, scaled.softmax(-1))
    top, drawn = (p.gather(1, ids[:, None])[:, 0] for ids in (want.token, want.sample))
    for name, mine, eager, exact in (
        ("entropy", got.entropy, want.entropy, -torch.xlogy(p, p).sum(-1)),
        ("soft", soft, distribution @ c["embedding"], p @ c["embedding"].double()),
        ("probability", got.probability, want.probability, top),
        ("sample", got.sample_probability, want.sample_probability, drawn),
    ):
        budget = 3 * (eager.double() - exact).abs().max() + 4e-6
        error = (mine.double() - exact).abs().max()
        assert error <= budget, (name, float(error), float(budget))
