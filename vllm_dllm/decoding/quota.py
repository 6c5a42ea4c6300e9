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
    decides::

        max(1, floor(m / S) + [n < m mod S])

    positions, those of the largest p; ties go to the lowest position. `even_share` computes the
    same number from the masks that are left.

    Source: ``get_num_transfer_tokens`` of LLaDA (arXiv 2502.09992), low-confidence remasking. There
    a step may decide nothing when S > m; here each decides one, so that none is wasted.
    """

    name: str = "FixedSteps"
    config: type[AlgorithmConfig] = FixedStepsConfig
    reads_decided: bool = False

    def step(self, canvas: Canvas, context: StepContext) -> Update:
        """See `Algorithm.step`."""
        return reveal(canvas, context, self.first(canvas, context, even_share(canvas, context)))

    def first(self, canvas: Canvas, context: StepContext, count: torch.Tensor) -> torch.Tensor:
        """The `count` (int64 ``[slots]``) masks that come first, bool ``[slots, L]``.

        The order is by confidence, unless a subclass has another one.
        """
        return most_confident(canvas, context, count)


@dataclass(frozen=True)
class StepsConfig(AlgorithmConfig):
    """Settings of SDAR's rules."""

    # A value of L or more decides one position per step.
    steps: int = setting(MAX_STEPS, "steps that a block is spread over", least=1, whole=True)


class LowConfidenceEven(FixedSteps):
    """Spreads the masks of a block evenly over its steps, the most confident first.

    With m masks left after s = 0, 1, ... of S steps, it decides the::

        ceil(m / (S - s))

    masks with the largest probabilities; ties go to the lowest position. Without a number of
    steps, each decides one position. Probabilities are taken over the whole vocabulary at
    temperature 1, even for drawn tokens, which is the one difference from `FixedSteps`.

    Stable-DiffCoder counts the m masks at the start of the block instead, and takes
    ``floor(m / S) + [s < m mod S]`` of them, skipping steps that would take none. That is the same
    number at every step.

    Source: the quota without a threshold of ``generate`` of Stable-DiffCoder
    (ByteDance-Seed/Stable-DiffCoder-8B-Instruct), ``low_confidence`` of Nemotron-Labs-Diffusion.
    """

    name: str = "LowConfidenceEven"
    config: type[AlgorithmConfig] = StepsConfig
    own_confidence: bool = True


class Leftmost(LowConfidenceEven):
    """Decides as many masks as `LowConfidenceEven` at every step, from left to right.

    `Sequential` differs in a block that begins with a prompt's tail, as `LowConfidenceStatic` does
    from `LowConfidenceEven`.

    Source: ``leftmost`` of Nemotron-Labs-Diffusion.
    """

    name: str = "Leftmost"

    def first(self, canvas: Canvas, context: StepContext, count: torch.Tensor) -> torch.Tensor:
        """See `FixedSteps.first`."""
        return canvas.masked.cumsum(1) <= count[:, None]


class LowConfidenceStatic(Algorithm):
    """Decides the same share of a block at every step, the most confident positions first.

    With M the masked positions, and n the quota of step s = 0, 1, ... of S steps::

        n = floor(L / S) + [s < L mod S]

    it decides the positions with the min(n, abs(M)) largest probabilities; ties go to the lowest
    position. `FixedSteps` differs in a block that begins with a prompt's tail: it spreads the
    masked positions over the steps, while this rule spreads all L. ``generate.py`` overwrites
    decided positions when fewer masks are left than the quota; here decided positions never change.

    Source: ``low_confidence_static`` of SDAR's ``generate.py`` (JetAstra/SDAR).
    """

    name: str = "LowConfidenceStatic"
    config: type[AlgorithmConfig] = StepsConfig
    reads_decided: bool = False
    own_confidence: bool = True

    def step(self, canvas: Canvas, context: StepContext) -> Update:
        """See `Algorithm.step`."""
        count = quota(canvas.tokens.shape[1], context)
        return reveal(canvas, context, most_confident(canvas, context, count))


@dataclass(frozen=True)
class LowConfidenceDynamicConfig(StepsConfig):
    """Settings of `LowConfidenceDynamic`; the threshold is that of SDAR's model card."""

    threshold: float = setting(0.9, "decide what is surer than this, if it is enough")


class LowConfidenceDynamic(Algorithm):
    """SDAR's default: a threshold, and a number of steps after which a block is finished.

    With M the masked positions, p the probability of each position's token and n the quota of the
    step as in `LowConfidenceStatic`::

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
    reads_decided: bool = False
    own_confidence: bool = True
    in_blocks: bool = True

    def step(self, canvas: Canvas, context: StepContext) -> Update:
        """See `Algorithm.step`."""
        probability = context.statistics.probability
        sure = canvas.masked & (probability > context.parameters["threshold"][:, None])
        count = quota(canvas.tokens.shape[1], context)
        share = most_confident(canvas, context, count)
        enough = sure.sum(1) >= count
        if context.forces is not None:
            enough = enough | ~context.forces
        return reveal(canvas, context, torch.where(enough[:, None], sure, share))


class Sequential(Algorithm):
    """Decides the masks among the n positions from the first mask on; n is the step's quota.

    The quota is that of `LowConfidenceStatic`. ``generate.py`` also overwrites decided positions
    among them; here they never change.

    Source: ``sequential`` of SDAR's ``generate.py`` (JetAstra/SDAR).
    """

    name: str = "Sequential"
    config: type[AlgorithmConfig] = StepsConfig
    reads_decided: bool = False

    def step(self, canvas: Canvas, context: StepContext) -> Update:
        """See `Algorithm.step`."""
        first = canvas.masked.int().argmax(1, keepdim=True)
        place = torch.arange(canvas.masked.shape[1], device=first.device) - first  # [slots, L]
        count = quota(canvas.tokens.shape[1], context).clamp_min(1)
        return reveal(canvas, context, (place >= 0) & (place < count[:, None]))


def quota(positions: torch.Tensor | int, context: StepContext) -> torch.Tensor:
    """The share of this step, int64 ``[slots]``, where `positions` are spread over ``steps``.

    SDAR's rules spread all L positions of every block, also of one that begins with a prompt's
    tail. `positions` may be a number for each slot, int64 ``[slots]``.

    Source: ``get_num_transfer_tokens`` of SDAR's ``generate.py`` (JetAstra/SDAR).

    Raises:
        TypeError: `context` has no step number.
    """
    steps, done = progress(context)
    return positions // steps + (done < positions % steps)


def even_share(canvas: Canvas, context: StepContext) -> torch.Tensor:
    """The masks left, divided by the steps left and rounded up; int64 ``[slots]``.

    Raises:
        TypeError: `context` has no step number.
    """
    steps, done = progress(context)
    left = (steps - done).clamp_min(1)
    return (canvas.masked.sum(1) + left - 1) // left


def progress(context: StepContext) -> tuple[torch.Tensor, torch.Tensor]:
    """The parameter ``steps``, and how many steps were taken before this one, ``[slots]`` each.

    Raises:
        TypeError: `context` has no step number.
    """
    if context.step is None:
        raise TypeError("this algorithm needs the number of the step")
    return context.parameters["steps"].long(), context.step


def most_confident(canvas: Canvas, context: StepContext, count: torch.Tensor) -> torch.Tensor:
    """The `count` (int64 ``[slots]``) masked positions of the largest probabilities.

    Ties go to the lowest position. If fewer positions are masked than `count`, others are true too;
    `reveal` ignores them.

    Returns:
        Bool ``[slots, L]``.
    """
    sureness = confidence(canvas, context.statistics.probability)
    return precedes(sureness).sum(2) < count[:, None]
