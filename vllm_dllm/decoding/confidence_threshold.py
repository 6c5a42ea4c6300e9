"""ConfidenceThreshold: decide every masked position that is sure enough, or the surest one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from vllm_dllm.decoding.base import Algorithm, Canvas, StepContext, Update, reveal
from vllm_dllm.ranges import AlgorithmConfig, setting


@dataclass(frozen=True)
class ConfidenceThresholdConfig(AlgorithmConfig):
    """Settings of `ConfidenceThreshold`; the threshold is Nemotron-Labs-Diffusion's."""

    threshold: float = setting(0.9, "decide what is at least as sure as this")


class ConfidenceThreshold(Algorithm):
    """The threshold rule of Stable-DiffCoder and Nemotron-Labs-Diffusion.

    With M the masked positions and p the probability of each position's token::

        accept = {i in M : p_i >= threshold}   and always   {argmax over M of p_i}

    Ties go to the lowest position. Probabilities are taken over the whole vocabulary at temperature
    1, even for drawn tokens. `LowConfidence` differs in that its comparison is strict, and in the
    confidence of drawn tokens. A threshold above 1 decides one position a step.

    Source: ``generate`` with a threshold of Stable-DiffCoder
    (ByteDance-Seed/Stable-DiffCoder-8B-Instruct), whose threshold is the preset ``-DiffCoder``, and
    ``confidence_threshold`` of Nemotron-Labs-Diffusion. Stable-DiffCoder also limits the steps of a
    block, and leaves masks in it when they are used up; here the last step decides all.
    """

    name: str = "ConfidenceThreshold"
    config: type[AlgorithmConfig] = ConfidenceThresholdConfig
    presets: Mapping[str, Mapping[str, float]] = MappingProxyType(
        {"DiffCoder": MappingProxyType({"threshold": 0.95})}
    )
    reads_decided: bool = False
    in_blocks: bool = True
    own_confidence: bool = True

    def step(self, canvas: Canvas, context: StepContext) -> Update:
        """See `Algorithm.step`."""
        sure = context.statistics.probability >= context.parameters["threshold"][:, None]
        return reveal(canvas, context, sure)
