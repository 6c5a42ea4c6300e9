"""FixedSteps: decide the same number of tokens at every step, the most confident first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from vllm_dllm.decoding.base import (
    Canvas,
    MaskedAlgorithm,
    StateTensor,
    StepContext,
    Update,
    reveal,
)
from vllm_dllm.decoding.registry import register_algorithm
from vllm_dllm.decoding.step_quota import most_confident
from vllm_dllm.ranges import AlgorithmConfig, setting


@dataclass(frozen=True)
class FixedStepsConfig(AlgorithmConfig):
    """Settings of `FixedSteps`."""

    steps: int = setting(32, "steps that a canvas is spread over", least=1, whole=True)


@register_algorithm
class FixedSteps(MaskedAlgorithm):
    """The schedule of LLaDA's first ``generate``: more steps cost time and give better answers.

    A canvas that starts with m masked positions is spread over S steps. Step n = 0, 1, ...
    decides::

        max(1, floor(m / S) + [n < m mod S])

    positions, those of the largest p; ties go to the lowest position.

    Source: ``get_num_transfer_tokens`` of LLaDA (arXiv 2502.09992), low-confidence remasking. There
    a step may decide nothing when S > m; here each decides one, so that none is wasted.
    """

    name: str = "FixedSteps"
    config: type[AlgorithmConfig] = FixedStepsConfig
    state: Mapping[str, StateTensor] = MappingProxyType(
        {"at_first": StateTensor(torch.int64, initial=-1, per_position=False)}
    )

    def step(self, canvas: Canvas, context: StepContext) -> Update:
        """See `Algorithm.step`."""
        if context.step is None:
            raise TypeError("FixedSteps needs the number of the step")
        at_first = context.state["at_first"]
        at_first = torch.where(at_first < 0, canvas.masked.sum(1), at_first)
        steps = context.parameters["steps"].long()
        count = at_first // steps + (context.step < at_first % steps)
        chosen = most_confident(canvas, context.statistics.probability, count)
        return reveal(canvas, context, chosen, state={"at_first": at_first})
