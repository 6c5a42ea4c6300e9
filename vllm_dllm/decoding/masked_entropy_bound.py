"""EntropyBound for masked models: reveal while the joint uncertainty is bounded."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_dllm.decoding.base import Canvas, MaskedAlgorithm, StepContext, Update, reveal
from vllm_dllm.decoding.registry import register_algorithm
from vllm_dllm.ops.statistics.rows import EntropyStatistics
from vllm_dllm.settings.ranges import AlgorithmConfig, setting


@dataclass(frozen=True)
class MaskedEntropyBoundConfig(AlgorithmConfig):
    """Settings of `MaskedEntropyBound`."""

    entropy_bound: float = setting(0.1, "nats that positions decided together may share")


@register_algorithm
class MaskedEntropyBound(MaskedAlgorithm):
    """Masked positions in the order of their entropies.

    With ``h_1 <= h_2 <= ...`` the k-th is decided when::

        h_1 + ... + h_(k-1) <= entropy_bound

    so the first always. The sum bounds the mutual information of what is decided together.
    Ties go to the lowest position.

    Source: Ben-Hamu et al., "Accelerated Sampling from Masked Diffusion Models via Entropy
    Bounded Unmasking" (arXiv 2505.24857).
    """

    name: str = "EntropyBound"
    config: type[AlgorithmConfig] = MaskedEntropyBoundConfig
    reads_entropy: bool = True

    def step(self, canvas: Canvas, context: StepContext) -> Update:
        """See `Algorithm.step`."""
        statistics = context.statistics
        if not isinstance(statistics, EntropyStatistics):
            raise TypeError("EntropyBound needs entropies")
        entropy = torch.where(canvas.masked, statistics.entropy, torch.inf)
        accept = within_bound(entropy, context.parameters["entropy_bound"])
        return reveal(canvas, context, accept)


def within_bound(entropy: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """Positions whose smaller entropies add up to at most ``bound`` ``[slots]``.

    ``entropy`` is ``[slots, L]``; positions of infinite entropy are never among them.
    """
    ordered, order = entropy.sort(dim=1, stable=True)
    # Infinity minus infinity is no number, and no comparison with that is true.
    smaller = ordered.cumsum(1) - ordered
    return torch.zeros_like(entropy, dtype=torch.bool).scatter_(1, order, smaller <= bound[:, None])
