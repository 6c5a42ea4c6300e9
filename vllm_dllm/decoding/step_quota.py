"""The minimum number of positions that a step of SDAR's published rules decides."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_dllm.decoding.base import Canvas, StepContext, confidence
from vllm_dllm.ranges import MAX_STEPS, AlgorithmConfig, setting


@dataclass(frozen=True)
class StepsConfig(AlgorithmConfig):
    """Settings of a rule that spreads a block over steps."""

    # A value of L or more decides one position per step.
    steps: int = setting(MAX_STEPS, "steps that a block is spread over", least=1, whole=True)


def step_quota(canvas: Canvas, context: StepContext) -> torch.Tensor:
    """The quota of step s = 0, 1, ... of S steps, int64 ``[slots]``: floor(L / S) + [s < L mod S].

    Steps are counted from 0 in every block, including one that begins with a prompt's tail.

    Source: ``get_num_transfer_tokens`` of SDAR's ``generate.py`` (JetAstra/SDAR).

    Raises:
        TypeError: `context` has no step number.
    """
    if context.step is None:
        raise TypeError("this algorithm needs the number of the step")
    length = canvas.tokens.shape[1]
    steps = context.parameters["steps"].long()
    return length // steps + (context.step < length % steps)


def most_confident(canvas: Canvas, probability: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """The masked positions with the largest probabilities, bool ``[slots, L]``.

    If fewer positions are masked than `count`, others are true too; `reveal` ignores them.

    Args:
        canvas: the canvases of the slots.
        probability: float32 ``[slots, L]``. Ties go to the lowest position.
        count: int64 ``[slots]``, the number of positions.
    """
    order = confidence(canvas, probability).argsort(dim=1, descending=True, stable=True)
    place = torch.arange(order.shape[1], device=order.device)
    rank = torch.empty_like(order).scatter_(1, order, place.expand_as(order))
    return rank < count[:, None]
