"""Attention with causal prompts and commits and bidirectional canvases, in one batch.

vLLM's backends take a tensor with one causal flag per request. This package's own backend takes one
mask rule per request, which can also say how a canvas sees a sliding-window layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.attention.backend import AttentionCGSupport

from vllm_dllm.attention.metadata import AttentionBatch
from vllm_dllm.engine.slots import Phase, SlotState
from vllm_dllm.ops.attention.masks import WHOLE, MaskRule, WindowRule

if TYPE_CHECKING:
    from vllm_dllm.attention.backend import MaskRules


class CausalUnlessDenoised:
    """An `AttentionRule`: every request is causal, unless its canvas is being denoised."""

    graph_support = AttentionCGSupport.ALWAYS

    def __init__(self, slots: SlotState) -> None:
        self.slots = slots
        # Persistent, for full CUDA graphs, and int32, the only dtype that FlashAttention accepts.
        self.causal = torch.zeros(len(slots.phase), dtype=torch.int32, device=slots.device)

    def metadata(self, batch: AttentionBatch) -> dict[str, Any]:
        """See `AttentionRule`."""
        requests = batch.input.num_reqs
        phase = self.slots.phase[batch.input.idx_mapping[:requests]]
        self.causal[:requests].copy_(phase != Phase.DENOISE)
        self.causal[requests : batch.rows].fill_(0)
        return batch.one_query_per_request(causal=self.causal[: batch.rows])


def causal_unless_denoised_rules(slots: SlotState, window: str) -> MaskRules:
    """The rules of `CausalUnlessDenoised` for our own backend; `window` as in `DllmSettings`."""
    from vllm_dllm.attention.backend import MaskRules

    of_denoised = int(WindowRule[window.upper()])

    def fill(batch: AttentionBatch, rule: MaskRule) -> None:
        requests = batch.input.num_reqs
        phase = slots.phase[batch.input.idx_mapping[:requests]]
        denoised = phase == Phase.DENOISE
        rule.block[:requests].copy_(torch.where(denoised, WHOLE, 1))
        rule.window[:requests].copy_(torch.where(denoised, of_denoised, int(WindowRule.SYMMETRIC)))

    return MaskRules(len(slots.phase), slots.device, fill)
