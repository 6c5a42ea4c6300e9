"""EntropyBound and EntropyBounded for masked models: decide while the uncertainty is bounded."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_dllm.decoding.base import Algorithm, Canvas, StepContext, Update, reveal
from vllm_dllm.decoding.entropy_bound import within_bound
from vllm_dllm.ops.statistics.rows import EntropyStatistics
from vllm_dllm.ranges import AlgorithmConfig, setting


@dataclass(frozen=True)
class MaskedEntropyBoundConfig(AlgorithmConfig):
    """Settings of `MaskedEntropyBound`."""

    entropy_bound: float = setting(0.1, "nats that positions decided together may share")


class MaskedEntropyBound(Algorithm):
    """Decides masked positions in the order of their entropies.

    With ``h_1 <= h_2 <= ...`` the k-th is decided when::

        h_1 + ... + h_(k-1) <= entropy_bound

    so the first one is always decided. The sum bounds the mutual information of the positions that
    are decided together. Ties go to the lowest position.

    Source: Ben-Hamu et al., "Accelerated Sampling from Masked Diffusion Models via Entropy
    Bounded Unmasking" (arXiv 2505.24857).
    """

    name: str = "EntropyBound"
    config: type[AlgorithmConfig] = MaskedEntropyBoundConfig
    reads_decided: bool = False
    reads_entropy: bool = True

    def step(self, canvas: Canvas, context: StepContext) -> Update:
        """See `Algorithm.step`."""
        statistics = context.statistics
        if not isinstance(statistics, EntropyStatistics):
            raise TypeError("EntropyBound needs entropies")
        entropy = torch.where(canvas.masked, statistics.entropy, torch.inf)
        accept = within_bound(entropy, context.parameters["entropy_bound"])
        return reveal(canvas, context, accept)


@dataclass(frozen=True)
class EntropyBoundedConfig(AlgorithmConfig):
    """Settings of `EntropyBounded`; the default is that of SDAR's ``generate.py``."""

    entropy_bound: float = setting(0.35, "nats that positions decided together may have")


class EntropyBounded(Algorithm):
    """Decides masked positions in the order of their entropies.

    With ``h_1 <= h_2 <= ...`` the k-th is decided when::

        k = 1   or   h_1 + ... + h_k < entropy_bound

    Ties go to the lowest position. `EntropyBound` leaves a position's own entropy out of its sum,
    and so decides one more.

    Source: JetEngine (Labman42/JetEngine), with the entropies of the full softmax. The rule of this
    name in SDAR's ``generate.py`` cannot run by itself.
    """

    name: str = "EntropyBounded"
    config: type[AlgorithmConfig] = EntropyBoundedConfig
    reads_decided: bool = False
    reads_entropy: bool = True

    def step(self, canvas: Canvas, context: StepContext) -> Update:
        """See `Algorithm.step`."""
        statistics = context.statistics
        if not isinstance(statistics, EntropyStatistics):
            raise TypeError("EntropyBounded needs entropies")
        entropy = torch.where(canvas.masked, statistics.entropy, torch.inf)
        rising, order = entropy.sort(dim=1, stable=True)
        few = rising.cumsum(1) < context.parameters["entropy_bound"][:, None]
        few[:, 0] = True
        return reveal(canvas, context, torch.zeros_like(few).scatter_(1, order, few))
