"""LowConfidenceDynamic: decide all sure positions, or else the step's share of the block."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_dllm.decoding.base import Canvas, MaskedAlgorithm, StepContext, Update, reveal
from vllm_dllm.decoding.registry import register_algorithm
from vllm_dllm.decoding.step_quota import StepsConfig, most_confident, step_quota
from vllm_dllm.ranges import AlgorithmConfig, setting


@dataclass(frozen=True)
class LowConfidenceDynamicConfig(StepsConfig):
    """Settings of `LowConfidenceDynamic`; the threshold is that of SDAR's model card."""

    threshold: float = setting(0.9, "decide what is surer than this, if it is enough")


@register_algorithm
class LowConfidenceDynamic(MaskedAlgorithm):
    """SDAR's default: a threshold, and a number of steps after which a block is finished.

    With M the masked positions, p the probability of each position's token and n the quota of the
    step (see `step_quota`)::

        sure = {i in M : p_i > threshold}
        accept = sure   where it has at least n positions, else the min(n, |M|) largest p of M

    Ties go to the lowest position. Probabilities are taken over the whole vocabulary at temperature
    1, even for drawn tokens; ``generate.py`` takes them after temperature, top-k and top-p, so
    greedy decoding (its top-k of 1) would be sure of everything. There, a step with fewer masks
    left than its quota overwrites decided positions (S < L); here decided positions never change.

    Source: ``low_confidence_dynamic`` of SDAR's ``generate.py`` (JetAstra/SDAR); the threshold 0.9
    of its model card (0.85 in ``generate.py``, 0.95 in its evaluation).
    """

    name: str = "LowConfidenceDynamic"
    config: type[AlgorithmConfig] = LowConfidenceDynamicConfig
    own_confidence: bool = True

    def step(self, canvas: Canvas, context: StepContext) -> Update:
        """See `Algorithm.step`."""
        probability = context.statistics.probability
        sure = canvas.masked & (probability > context.parameters["threshold"][:, None])
        quota = step_quota(canvas, context)
        share = most_confident(canvas, probability, quota)
        enough = sure.sum(1) >= quota
        return reveal(canvas, context, torch.where(enough[:, None], sure, share))
