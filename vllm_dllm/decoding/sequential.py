"""Sequential: decide the step's share of the block from left to right."""

from __future__ import annotations

import torch

from vllm_dllm.decoding.base import Canvas, MaskedAlgorithm, StepContext, Update, reveal
from vllm_dllm.decoding.registry import register_algorithm
from vllm_dllm.decoding.step_quota import StepsConfig, step_quota
from vllm_dllm.ranges import AlgorithmConfig


@register_algorithm
class Sequential(MaskedAlgorithm):
    """Decides the masks among the n positions from the first mask on; n is the step's quota.

    ``generate.py`` also overwrites decided positions among them; here they never change.

    Source: ``sequential`` of SDAR's ``generate.py`` (JetAstra/SDAR); the quota as in `step_quota`.
    """

    name: str = "Sequential"
    config: type[AlgorithmConfig] = StepsConfig

    def step(self, canvas: Canvas, context: StepContext) -> Update:
        """See `Algorithm.step`."""
        first = canvas.masked.int().argmax(1, keepdim=True)
        place = torch.arange(canvas.masked.shape[1], device=first.device) - first  # [slots, L]
        quota = step_quota(canvas, context).clamp_min(1)
        return reveal(canvas, context, (place >= 0) & (place < quota[:, None]))
