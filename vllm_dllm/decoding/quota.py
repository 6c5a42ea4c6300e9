"""Rules that decide a fixed share of the block at every step, spread over a number of steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_dllm.decoding.base import (
    Algorithm,
    Canvas,
    StepContext,
    Update,
    confidence,
    precedes,
    reveal,
)
from vllm_dllm.ranges import MAX_STEPS, AlgorithmConfig, setting


@dataclass(frozen=True)
class FixedStepsConfig(AlgorithmConfig):
    """Settings of `FixedSteps`."""

    steps: int = setting(32, "steps that a canvas is spread over", least=1, whole=True)


class FixedSteps(Algorithm):
    """The schedule of LLaDA's first ``generate``: more steps cost time and give better answers.

    A canvas that starts with m masked positions is spread over S steps. Step n = 0, 1, ...
    decides the ``max(1, floor(m / S) + [n < m mod S])`` positions of the largest p; ties go to the
    lowest position. `share` computes the same number from the masks that are left.

    Source: ``get_num_transfer_tokens`` of LLaDA (arXiv 2502.09992), low-confidence remasking. There
    a step may decide nothing when S > m; here each decides one, so that none is wasted.
    """

    name: str = "FixedSteps"
    config: type[AlgorithmConfig] = FixedStepsConfig
    reads_decided: bool = False

    def step(self, canvas: Canvas, context: StepContext) -> Update:
        """See `Algorithm.step`."""
        count = self.share(canvas, context)
        return reveal(canvas, context, self.first(count, canvas, context))

    def share(self, canvas: Canvas, context: StepContext) -> torch.Tensor:
        """The masks to decide: those left by the steps left, rounded up; int64 ``[slots]``."""
        steps, done = progress(context)
        left = (steps - done).clamp_min(1)
        return (canvas.masked.sum(1) + left - 1) // left

    def first(self, count: torch.Tensor, canvas: Canvas, context: StepContext) -> torch.Tensor:
        """The `count` masked positions of the largest p, bool ``[slots, L]``.

        If fewer positions are masked than `count`, others are true too; `reveal` ignores them.
        """
        sureness = confidence(canvas, context.statistics.probability)
        return precedes(sureness).sum(2) < count[:, None]


@dataclass(frozen=True)
class StepsConfig(AlgorithmConfig):
    """Settings of SDAR's rules."""

    # A value of L or more decides one position per step.
    steps: int = setting(MAX_STEPS, "steps that a block is spread over", least=1, whole=True)


class LowConfidenceEven(FixedSteps):
    """Spreads the masks of a block evenly over its steps, the most confident first.

    With m masks left after s = 0, 1, ... of S steps, it decides ``ceil(m / (S - s))`` of them,
    which are as many as `FixedSteps` and Stable-DiffCoder decide. Without a number of steps, each
    decides one position. The one difference from `FixedSteps` is that the probabilities of drawn
    tokens, too, are those at temperature 1.

    Source: the quota without a threshold of ``generate`` of Stable-DiffCoder
    (ByteDance-Seed/Stable-DiffCoder-8B-Instruct), ``low_confidence`` of Nemotron-Labs-Diffusion.
    """

    name: str = "LowConfidenceEven"
    config: type[AlgorithmConfig] = StepsConfig
    own_confidence: bool = True


class Leftmost(LowConfidenceEven):
    """Decides as many masks as `LowConfidenceEven` at every step, from left to right.

    `Sequential` differs in a block that begins with a prompt's tail.

    Source: ``leftmost`` of Nemotron-Labs-Diffusion.
    """

    name: str = "Leftmost"

    def first(self, count: torch.Tensor, canvas: Canvas, context: StepContext) -> torch.Tensor:
        """See `FixedSteps.first`."""
        return canvas.masked.cumsum(1) <= count[:, None]


class LowConfidenceStatic(LowConfidenceEven):
    """Decides the same share of a block at every step, the most confident positions first.

    With M the masked positions, and n the quota of step s = 0, 1, ... of S steps::

        n = floor(L / S) + [s < L mod S]

    it decides the positions with the min(n, abs(M)) largest probabilities; ties go to the lowest
    position. `FixedSteps` spreads only the positions after a prompt's tail over the steps, while
    this rule spreads all L. ``generate.py`` overwrites decided positions when fewer masks are left
    than the quota; here decided positions never change.

    Source: ``low_confidence_static`` of SDAR's ``generate.py`` (JetAstra/SDAR).
    """

    name: str = "LowConfidenceStatic"

    def share(self, canvas: Canvas, context: StepContext) -> torch.Tensor:
        """See `FixedSteps.share`."""
        return quota(canvas.tokens.shape[1], context)


@dataclass(frozen=True)
class LowConfidenceDynamicConfig(StepsConfig):
    """Settings of `LowConfidenceDynamic`; the threshold is that of SDAR's model card."""

    threshold: float = setting(0.9, "decide what is surer than this, if it is enough")


class LowConfidenceDynamic(LowConfidenceStatic):
    """SDAR's default: a threshold, and a number of steps after which a block is finished.

    With M the masked positions, p the probability of each position's token and n the quota of the
    step as in `LowConfidenceStatic`::

        sure = {i in M : p_i > threshold}
        accept = sure   where it has at least n positions, else the min(n, |M|) largest p of M

    Ties go to the lowest position. Probabilities are taken over the whole vocabulary at temperature
    1, even for drawn tokens; ``generate.py`` takes them after temperature, top-k and top-p, so
    greedy decoding (its top-k of 1) would be sure of everything.

    Source: ``low_confidence_dynamic`` of SDAR's ``generate.py`` (JetAstra/SDAR); the threshold 0.9
    of its model card (0.85 in ``generate.py``, 0.95 in its evaluation).
    """

    name: str = "LowConfidenceDynamic"
    config: type[AlgorithmConfig] = LowConfidenceDynamicConfig
    in_blocks: bool = True

    def first(self, count: torch.Tensor, canvas: Canvas, context: StepContext) -> torch.Tensor:
        """See `FixedSteps.first`: the sure ones, if they are enough."""
        probability = context.statistics.probability
        sure = canvas.masked & (probability > context.parameters["threshold"][:, None])
        enough = sure.sum(1) >= count
        if context.forces is not None:
            enough = enough | ~context.forces
        return torch.where(enough[:, None], sure, super().first(count, canvas, context))


class Sequential(LowConfidenceStatic):
    """Decides the masks among the n positions from the first mask on; n is the step's quota.

    The quota is that of `LowConfidenceStatic`, and so is the difference from ``generate.py``.

    Source: ``sequential`` of SDAR's ``generate.py`` (JetAstra/SDAR).
    """

    name: str = "Sequential"
    own_confidence: bool = False

    def first(self, count: torch.Tensor, canvas: Canvas, context: StepContext) -> torch.Tensor:
        """See `FixedSteps.first`."""
        begin = canvas.masked.int().argmax(1, keepdim=True)
        place = torch.arange(canvas.masked.shape[1], device=begin.device) - begin  # [slots, L]
        return (place >= 0) & (place < count.clamp_min(1)[:, None])


def quota(positions: torch.Tensor | int, context: StepContext) -> torch.Tensor:
    """The share of this step, int64 ``[slots]``, where `positions` are spread over ``steps``.

    `positions` may be a number for each slot, int64 ``[slots]``.

    Source: ``get_num_transfer_tokens`` of SDAR's ``generate.py`` (JetAstra/SDAR).
    """
    steps, done = progress(context)
    return positions // steps + (done < positions % steps)


def progress(context: StepContext) -> tuple[torch.Tensor, torch.Tensor]:
    """The parameter ``steps``, and how many steps were taken before this one, ``[slots]`` each.

    Raises:
        TypeError: `context` has no step number.
    """
    if context.step is None:
        raise TypeError("this algorithm needs the number of the step")
    return context.parameters["steps"].long(), context.step
