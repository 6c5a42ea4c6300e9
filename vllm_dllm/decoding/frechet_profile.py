"""FrechetProfile: decide as many positions as are right together with a bounded probability."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_dllm.decoding.base import Algorithm, Canvas, StepContext, Update, precedes, reveal
from vllm_dllm.ranges import AlgorithmConfig, setting


@dataclass(frozen=True)
class FrechetProfileConfig(AlgorithmConfig):
    """Settings of `FrechetProfile`."""

    threshold: float = setting(
        0.9, "decide what is together at least this sure", above=True, most=1.0
    )


class FrechetProfile(Algorithm):
    """Decides the largest set of masked positions that is surely right as a whole.

    With ``p_1 >= p_2 >= ...`` the probabilities of the masked positions, the first n are decided,
    for the largest n with::

        max(0, p_1 + ... + p_n - (n - 1)) >= threshold   or   n = 1

    The left side is Fréchet's lower bound of the probability that all n tokens are right, whatever
    their dependence, so a set may miss ``1 - threshold`` in all: the more positions, the surer each
    has to be. Ties go to the lowest position. The sums are those of ``1 - p``, in float32.

    Source: the bound of M. Fréchet (1951), in the place that Fast-dLLM++ (arXiv 2606.02955) gives
    it. The paper was not available, so its own profile may differ from this form.
    """

    name: str = "FrechetProfile"
    config: type[AlgorithmConfig] = FrechetProfileConfig
    reads_decided: bool = False
    in_blocks: bool = True

    def step(self, canvas: Canvas, context: StepContext) -> Update:
        """See `Algorithm.step`."""
        missing = 1 - context.statistics.probability
        sureness = torch.where(canvas.masked, -missing, -torch.inf)
        before = torch.where(precedes(sureness) & canvas.masked[:, None], missing[:, None], 0.0)
        allowed = 1 - context.parameters["threshold"]
        return reveal(canvas, context, before.sum(2) + missing <= allowed[:, None])
