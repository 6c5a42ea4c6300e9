"""EntropyBound: accept the positions whose joint uncertainty is bounded, renoise the others."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from vllm_dllm.decoding.base import (
    Canvas,
    StateTensor,
    StepContext,
    Update,
    register_algorithm,
)
from vllm_dllm.ops.sampled_stats import SampledStatistics


@register_algorithm
class EntropyBound:
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
    parameters: tuple[str, ...] = (
        *("entropy_bound", "t_min", "t_max", "schedule_steps"),
        *("stability_threshold", "confidence_threshold", "temperature"),
    )
    state: Mapping[str, StateTensor] = MappingProxyType(
        {
            "argmax": StateTensor(torch.int64, per_position=True, initial=-1),
            "unchanged": StateTensor(torch.int32, per_position=False, initial=0),
        }
    )
    samples: bool = True
    edits: bool = True

    def temperature(
        self, step: torch.Tensor, parameters: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """The schedule, see `Algorithm.temperature`."""
        total = parameters["schedule_steps"]
        remaining = (total - step).clamp(min=1)
        span = parameters["t_max"] - parameters["t_min"]
        return parameters["temperature"] * (parameters["t_min"] + span * (remaining / total))

    def step(self, canvas: Canvas, context: StepContext) -> Update:
        """See `Algorithm.step`."""
        statistics, parameters, state = context.statistics, context.parameters, context.state
        if not isinstance(statistics, SampledStatistics) or context.noise is None:
            raise TypeError("EntropyBound needs sampled statistics and noise")
        entropy, changes = statistics.entropy, statistics.token != state["argmax"]
        if context.present is not None:
            entropy = torch.where(context.present, entropy, torch.inf)
            changes = changes & context.present
        accept = self._accept(entropy, parameters["entropy_bound"])
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
    def _accept(entropy: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
        """Bool ``[slots, L]``; positions of infinite entropy are never accepted."""
        ordered, order = entropy.sort(dim=1, stable=True)
        # Infinity minus infinity is no number, and no comparison with that is true.
        smaller = ordered.cumsum(1) - ordered
        return torch.zeros_like(entropy, dtype=torch.bool).scatter_(
            1, order, smaller <= bound[:, None]
        )

    @staticmethod
    def _mean(entropy: torch.Tensor, present: torch.Tensor | None) -> torch.Tensor:
        if present is None:
            return entropy.mean(1)
        return torch.where(present, entropy, 0.0).sum(1) / present.sum(1)
