"""LowConfidence: decide every masked position that the model is sure of, or the surest one."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_dllm.decoding.base import Algorithm, Canvas, StepContext, Update, reveal
from vllm_dllm.ranges import AlgorithmConfig, setting


@dataclass(frozen=True)
class LowConfidenceConfig(AlgorithmConfig):
    """Settings of `LowConfidence`."""

    threshold: float = setting(
        0.95, "decide what is surer than this; 1 or more decides one position a step"
    )


class LowConfidence(Algorithm):
    """Threshold decoding, the default of LLaDA2 (and of SGLang's class of the same name).

    With M the masked positions, x the argmax and p its probability::

        accept = {i in M : p_i > threshold}   or, when that is empty,   {argmax over M of p_i}

    Ties go to the lowest position. Each step decides at least one position, so a canvas of
    L positions is finished after at most L steps. A threshold of 1 or more decides one
    position a step. Positions outside M never change.

    Source: LLaDA2.0 (``generate`` with ``threshold``, steps = block length).
    """

    name: str = "LowConfidence"
    config: type[AlgorithmConfig] = LowConfidenceConfig
    reads_decided: bool = False
    in_blocks: bool = True

    def step(self, canvas: Canvas, context: StepContext) -> Update:
        """See `Algorithm.step`."""
        sure = context.statistics.probability > context.parameters["threshold"][:, None]
        return reveal(canvas, context, sure)
