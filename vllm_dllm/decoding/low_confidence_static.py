"""LowConfidenceStatic: decide the step's share of the block, the most confident positions first."""

from __future__ import annotations

from vllm_dllm.decoding.base import Canvas, MaskedAlgorithm, StepContext, Update, reveal
from vllm_dllm.decoding.registry import register_algorithm
from vllm_dllm.decoding.step_quota import StepsConfig, most_confident, step_quota
from vllm_dllm.ranges import AlgorithmConfig


@register_algorithm
class LowConfidenceStatic(MaskedAlgorithm):
    """Decides the same share of a block at every step.

    With M the masked positions and n the quota of the step (see `step_quota`), it decides the
    positions with the min(n, abs(M)) largest probabilities; ties go to the lowest position.
    `FixedSteps` differs in a block that begins with a prompt's tail: it spreads the masked
    positions over the steps, while this rule spreads all L. ``generate.py`` overwrites decided
    positions when fewer masks are left than the quota; here decided positions never change.

    Source: ``low_confidence_static`` of SDAR's ``generate.py`` (JetAstra/SDAR).
    """

    name: str = "LowConfidenceStatic"
    config: type[AlgorithmConfig] = StepsConfig
    own_confidence: bool = True

    def step(self, canvas: Canvas, context: StepContext) -> Update:
        """See `Algorithm.step`."""
        quota = step_quota(canvas, context)
        share = most_confident(canvas, context.statistics.probability, quota)
        return reveal(canvas, context, share)
