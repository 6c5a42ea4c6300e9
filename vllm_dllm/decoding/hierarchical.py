"""Hierarchical: divide runs of masks, so that positions decided together lie far apart."""

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
from vllm_dllm.ranges import AlgorithmConfig, setting


@dataclass(frozen=True)
class HierarchicalConfig(AlgorithmConfig):
    """Settings of `Hierarchical`."""

    threshold: float = setting(0.9, "decide every position that is surer than this")
    low: float = setting(0.6, "decide the surest position of a run when it is surer than this")


class Hierarchical(Algorithm):
    """Decides one position of every run of masks, all sure positions, and the surest one.

    With R the maximal runs of neighbouring masked positions and p the argmax' probability::

        accept = {i in M : p_i > threshold}
               + {best of r : r in R, p_best > low}
               + {argmax over M of p_i}

    Ties go to the lowest position. Positions of one run depend on each other most; cutting a
    run in its middle halves it, so that a canvas needs about log2 of its length in steps.

    Source: hierarchical decoding of dInfer (arXiv 2510.08666).
    """

    name: str = "Hierarchical"
    config: type[AlgorithmConfig] = HierarchicalConfig
    reads_decided: bool = False

    def step(self, canvas: Canvas, context: StepContext) -> Update:
        """See `Algorithm.step`."""
        sureness = confidence(canvas, context.statistics.probability)  # [slots, L]
        accept = sureness > context.parameters["threshold"][:, None]
        best = best_of_runs(canvas.masked, sureness)
        accept = accept | (best & (sureness > context.parameters["low"][:, None]))
        surest = sureness.argmax(1, keepdim=True)
        return reveal(canvas, context, accept.scatter(1, surest, True))


def best_of_runs(masked: torch.Tensor, sureness: torch.Tensor) -> torch.Tensor:
    """The first position of the largest value in each run of ``masked``; bool ``[slots, L]``."""
    starts = masked.clone()
    starts[:, 1:] &= ~masked[:, :-1]
    run = starts.cumsum(1)  # [slots, L], of masked positions the number of their run
    same = masked[:, None, :] & (run[:, :, None] == run[:, None, :])
    return masked & ~(same & precedes(sureness)).any(2)
