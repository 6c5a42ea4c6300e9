"""EntropyBound for both kinds of models, and EntropyBounded: accept while entropies are bounded."""

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
    reveal,
)
from vllm_dllm.decoding.quota import progress
from vllm_dllm.ops.statistics.rows import EntropyStatistics, SampledStatistics
from vllm_dllm.ranges import MAX_STEPS, AlgorithmConfig, SettingsError, setting


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
    the others a uniform random token, and fixed ones keep their token. The canvas is done when its
    argmax has stayed the same for `stability_threshold` steps and the mean entropy is below
    `confidence_threshold`, or at the step cap. What is committed is the argmax.

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
        if context.present is None:
            mean = entropy.mean(1)
        else:
            mean = torch.where(context.present, entropy, 0.0).sum(1) / context.present.sum(1)
            entropy = torch.where(context.present, entropy, torch.inf)
            changes = changes & context.present
        accept = within_bound(entropy, parameters["entropy_bound"])
        proposal = torch.where(accept, statistics.sample, context.noise)

        unchanged = torch.where(changes.any(1), 0, state["unchanged"] + 1)
        stable = unchanged >= parameters["stability_threshold"]
        confident = mean < parameters["confidence_threshold"]
        done = (stable & confident) | context.last
        tokens = torch.where(done[:, None], statistics.token, proposal)
        tokens = torch.where(canvas.fixed, canvas.tokens, tokens)
        # It could be the token everywhere. But what depends on all that is read of the state is
        # written in place by a compiled update, and otherwise in a copy for all slots.
        argmax = torch.where(unchanged[:, None] == 0, statistics.token, state["argmax"])
        return Update(
            Canvas(tokens, canvas.masked, canvas.fixed),
            done,
            {"argmax": argmax, "unchanged": unchanged.int()},
        )


def within_bound(entropy: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """Positions for which all smaller entropies of the row add up to at most the bound.

    Entropies are float32 ``[slots, L]``, the bound ``[slots]``, both in nats. Positions of infinite
    entropy are never in the result, bool ``[slots, L]``.
    """
    ordered, order = entropy.sort(dim=1, stable=True)
    # Infinity minus infinity is NaN, and every comparison with NaN is false.
    smaller = ordered.cumsum(1) - ordered
    return torch.zeros_like(entropy, dtype=torch.bool).scatter_(1, order, smaller <= bound[:, None])


@dataclass(frozen=True)
class MaskedEntropyBoundConfig(AlgorithmConfig):
    """Settings of `MaskedEntropyBound`."""

    entropy_bound: float = setting(0.1, "nats that positions decided together may share")


class MaskedEntropyBound(Algorithm):
    """Decides masked positions in the order of their entropies; the rule of `EntropyBound`.

    The first position is always decided. Ties go to the lowest position.
    """

    name: str = "EntropyBound"
    config: type[AlgorithmConfig] = MaskedEntropyBoundConfig
    reads_decided: bool = False
    reads_entropy: bool = True

    def step(self, canvas: Canvas, context: StepContext) -> Update:
        """See `Algorithm.step`."""
        if not isinstance(context.statistics, EntropyStatistics):
            raise TypeError(f"{self.name} needs entropies")
        entropy = torch.where(canvas.masked, context.statistics.entropy, torch.inf)
        accept = self.accepted(entropy, context.parameters["entropy_bound"])
        return reveal(canvas, context, accept)

    def accepted(self, entropy: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
        """The positions to decide; arguments and result as for the function `within_bound`."""
        return within_bound(entropy, bound)


@dataclass(frozen=True)
class EntropyBoundedConfig(AlgorithmConfig):
    """Settings of `EntropyBounded`; the default is that of SDAR's ``generate.py``."""

    entropy_bound: float = setting(0.35, "nats that positions decided together may have")


class EntropyBounded(MaskedEntropyBound):
    """Decides masked positions in the order of their entropies.

    With ``h_1 <= h_2 <= ...`` the k-th is decided when::

        k = 1   or   h_1 + ... + h_k < entropy_bound

    `EntropyBound` leaves a position's own entropy out of its sum, and so decides one more.

    Source: JetEngine (Labman42/JetEngine), with the entropies of the full softmax. The rule of this
    name in SDAR's ``generate.py`` cannot run by itself.
    """

    name: str = "EntropyBounded"
    config: type[AlgorithmConfig] = EntropyBoundedConfig

    def accepted(self, entropy: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
        """See `MaskedEntropyBound.accepted`."""
        rising, order = entropy.sort(dim=1, stable=True)
        few = rising.cumsum(1) < bound[:, None]
        few[:, 0] = True
        return torch.zeros_like(few).scatter_(1, order, few)


@dataclass(frozen=True)
class TokenEntropyBoundedConfig(EntropyBoundedConfig):
    """Settings of `TokenEntropyBounded`; the bound is that of DreamReasoner's code."""

    # A value of L or more leaves the last step nothing but what the rule decides.
    steps: int = setting(MAX_STEPS, "steps after which a block is finished", least=1, whole=True)


class TokenEntropyBounded(EntropyBounded):
    """`EntropyBounded` with the share of the decided token in a row's entropy, ``-p ln p``.

    With p the token's probability, at least 1e-12. The share is 0 for p = 1 and small again for a
    small p, so that p = 0.01 comes before p = 0.9. The last of the steps decides all that is left.

    Source: ``entropy_bounded`` of DreamReasoner's ``generation_utils.py`` (Dream-org).
    """

    name: str = "TokenEntropyBounded"
    config: type[AlgorithmConfig] = TokenEntropyBoundedConfig
    reads_entropy: bool = False
    own_confidence: bool = True

    def step(self, canvas: Canvas, context: StepContext) -> Update:
        """See `Algorithm.step`."""
        p = context.statistics.probability.clamp_min(1e-12)
        entropy = torch.where(canvas.masked, -p * p.log(), torch.inf)
        steps, done = progress(context)
        accept = self.accepted(entropy, context.parameters["entropy_bound"])
        return reveal(canvas, context, accept | (done + 1 >= steps)[:, None])
