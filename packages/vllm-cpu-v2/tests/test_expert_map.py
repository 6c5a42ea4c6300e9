"""Plain experts with a map compute with a rank's own experts; the ranks' sums are the whole."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm_cpu_v2.plain_experts import PlainExperts, unrounded

TOKENS, HIDDEN, SIZE, EXPERTS, CHOSEN = 48, 32, 16, 8, 3


def computed(
    w1: torch.Tensor, w2: torch.Tensor, expert_map: torch.Tensor | None, **rows: torch.Tensor
) -> torch.Tensor:
    output = torch.full((TOKENS, HIDDEN), torch.nan)
    itself: Any = SimpleNamespace(roundings=(unrounded, unrounded))
    activation = MoEActivation.SILU
    PlainExperts.apply(
        itself, output, w1=w1, w2=w2, activation=activation, expert_map=expert_map, **rows
    )
    return output


def test_ranks_sum_to_the_whole() -> None:
    """Also where experts are dealt out in turn, and where a rank has none of a token's."""
    generator = torch.Generator().manual_seed(0)
    w1 = torch.randn(EXPERTS, 2 * SIZE, HIDDEN, generator=generator)
    w2 = torch.randn(EXPERTS, HIDDEN, SIZE, generator=generator)
    weights, ids = torch.rand(TOKENS, EXPERTS, generator=generator).topk(CHOSEN)
    ids[0] = torch.arange(CHOSEN)  # all on the first rank
    rows = {
        "hidden_states": torch.randn(TOKENS, HIDDEN, generator=generator),
        "topk_weights": weights,
        "topk_ids": ids.to(torch.int32),
    }
    whole = computed(w1, w2, None, **rows)
    halves = [range(EXPERTS // 2), range(EXPERTS // 2, EXPERTS)]
    in_turn = [range(0, EXPERTS, 2), range(1, EXPERTS, 2)]
    for dealt in (halves, in_turn):
        parts = []
        for own in map(list, dealt):
            expert_map = torch.full((EXPERTS,), -1, dtype=torch.int32)
            expert_map[own] = torch.arange(len(own), dtype=torch.int32)
            parts.append(computed(w1[own], w2[own], expert_map, **rows))
        assert not torch.equal(parts[0], whole)
        torch.testing.assert_close(sum(parts), whole)
