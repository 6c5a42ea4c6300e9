"""EntropyBound: accept the positions whose joint uncertainty is bounded, renoise the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from vllm_dllm.decoding.base import (
    Algorithm,
    Canvas,
    Corruption,
    StateTensor,
    StepContext,
    Update,
)
from vllm_dllm.ops.statistics.rows import SampledStatistics
from vllm_dllm.ranges import AlgorithmConfig, SettingsError, setting


@dataclass(frozen=True)
class EntropyBoundConfig(AlgorithmConfig):
    """Settings of `EntropyBound`; the defaults are those of transformers' DiffusionGemma."""

    entropy_bound: float = setting(0.1, "nats that accepted positions may share", above=True)
    t_min: float = setting(0.4, "temperature after the last step")
    t_max: float = setting(0.8, "temperature of the first step", above=True)
    stability_threshold: int = setting(
        1, "steps for which the argmax canvas must stay the same", whole=True
    )
    confidence_threshold: float = setting(
        0.005, "mean entropy in nats below which a canvas may end", above=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.t_max <= self.t_min:
            raise SettingsError(f"t_max must be above t_min={self.t_min}, got {self.t_max}")


class EntropyBound(Algorithm):
    """DiffusionGemma's sampler for uniform noise.

    Step n = 0, 1, ... of at most N samples a candidate y at every position from
    ``softmax(logits / T)``, ``T = temperature * (t_min + (t_max - t_min) * (N - n) / N)``. With
    the entropies sorted, ``h_1 <= h_2 <= ...``, the k-th position is accepted while::

        h_1 + ... + h_(k-1) <= entropy_bound

    (the mutual information of the accepted tokens is at most that). Accepted positions take y,
    the others a uniform random token. Pinned (fixed) positions keep their token.

    The canvas is done when its argmax has stayed the same for `stability_threshold` steps and
    the mean entropy is below `confidence_threshold`, or at the step cap. What is committed is
    the argmax, not the noisy canvas.

    Source: Ben-Hamu et al., "Accelerated Sampling from Masked Diffusion Models via Entropy
    Bounded Unmasking" (arXiv 2505.24857); ``EntropyBoundSampler`` and
    ``StableAndConfidentStoppingCriteria`` in transformers' DiffusionGemma.
    """

    name: str = "EntropyBound"
    corruption: Corruption = "uniform"
    config: type[AlgorithmConfig] = EntropyBoundConfig
    state: Mapping[str, StateTensor] = MappingProxyType(
        {
            "argmax": StateTensor(torch.int64, initial=-1),
            "unchanged": StateTensor(torch.int32, initial=0, per_position=False),
        }
    )
    edits: bool = True
    reads_entropy: bool = True

    def cap(self, length: int, settings: AlgorithmConfig) -> int:
        """See `Algorithm.cap`: the default of transformers' DiffusionGemma."""
        return 48

    def temperature(
        self,
        temperature: torch.Tensor,
        progress: tuple[torch.Tensor, torch.Tensor],
        parameters: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """See `Algorithm.temperature`: the request's temperature times the schedule."""
        step, total = progress
        remaining = (total - step).clamp(min=1)
        span = parameters["t_max"] - parameters["t_min"]
        return temperature * (parameters["t_min"] + span * (remaining / total))

    def step(self, canvas: Canvas, context: StepContext) -> Update:
        """See `Algorithm.step`."""
        statistics, parameters, state = context.statistics, context.parameters, context.state
        if not isinstance(statistics, SampledStatistics) or context.noise is None:
            raise TypeError("EntropyBound needs sampled statistics and noise")
        entropy, changes = statistics.entropy, statistics.token != state["argmax"]
        if context.present is not None:
            entropy = torch.where(context.present, entropy, torch.inf)
            changes = changes & context.present
        accept = within_bound(entropy, parameters["entropy_bound"])
        proposal = torch.where(accept, statistics.sample, context.noise)

        unchanged = torch.where(changes.any(1), 0, state["unchanged"] + 1)
        stable = unchanged >= parameters["stability_threshold"]
        confident = self._mean(entropy, context.present) < parameters["confidence_threshold"]
        done = (stable & confident) | context.last
        tokens = torch.where(done[:, None], statistics.token, proposal)
        tokens = torch.where(canvas.fixed, canvas.tokens, tokens)
        return Update(
            Canvas(tokens, canvas.masked, canvas.fixed),
            done,
            {"argmax": statistics.token, "unchanged": unchanged.int()},
        )

    @staticmethod
    def _mean(entropy: torch.Tensor, present: torch.Tensor | None) -> torch.Tensor:
        """Mean entropy of the positions that exist, float32 ``[slots]``."""
        if present is None:
            return entropy.mean(1)
        return torch.where(present, entropy, 0.0).sum(1) / present.sum(1)


def within_bound(entropy: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """Positions for which all smaller entropies of the row add up to at most the bound.

    Args:
        entropy: float32 ``[slots, L]``; positions of infinite entropy are never in the result.
        bound: float32 ``[slots]``, in nats.

    Returns:
        Bool ``[slots, L]``.
    """
    ordered, order = entropy.sort(dim=1, stable=True)
    # Infinity minus infinity is NaN, and every comparison with NaN is false.
    smaller = ordered.cumsum(1) - ordered
    return torch.zeros_like(entropy, dtype=torch.bool).scatter_(1, order, smaller <= bound[:, None])
