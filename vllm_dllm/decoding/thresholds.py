"""Rules that decide the masked positions that are sure enough, and at least the surest one.

Ties go to the lowest position. Probabilities are taken over the whole vocabulary at temperature 1;
`Algorithm.own_confidence` says which confidence drawn tokens have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from vllm_dllm.decoding.base import (
    ALL_BESIDE,
    Algorithm,
    Beside,
    Canvas,
    StepContext,
    Update,
    confidence,
    precedes,
    reveal,
)
from vllm_dllm.ranges import AlgorithmConfig, setting


@dataclass(frozen=True)
class LowConfidenceConfig(AlgorithmConfig):
    """Settings of `LowConfidence`."""

    threshold: float = setting(
        0.95, "decide what is surer than this; 1 or more decides one position a step"
    )


class LowConfidence(Algorithm):
    """Threshold decoding, the default of LLaDA2 (and of SGLang's class of the same name).

    With M the masked positions, x the argmax and p its probability::

        accept = {i in M : p_i > threshold}   or, when that is empty,   {argmax over M of p_i}

    Source: LLaDA2.0 (``generate`` with ``threshold``, steps = block length).
    """

    name: str = "LowConfidence"
    config: type[AlgorithmConfig] = LowConfidenceConfig
    reads_decided: bool = False
    in_blocks: bool = True

    def step(self, canvas: Canvas, context: StepContext) -> Update:
        """See `Algorithm.step`."""
        sure = context.statistics.probability > context.parameters["threshold"][:, None]
        return reveal(canvas, context, sure)


@dataclass(frozen=True)
class ConfidenceThresholdConfig(AlgorithmConfig):
    """Settings of `ConfidenceThreshold`; the threshold is Nemotron-Labs-Diffusion's."""

    threshold: float = setting(0.9, "decide what is at least as sure as this")


class ConfidenceThreshold(Algorithm):
    """The threshold rule of Stable-DiffCoder and Nemotron-Labs-Diffusion.

    `LowConfidence` differs in that its comparison is strict, and in the confidence of drawn tokens.
    A threshold above 1 decides one position a step.

    Source: ``generate`` with a threshold of Stable-DiffCoder
    (ByteDance-Seed/Stable-DiffCoder-8B-Instruct), whose threshold is the preset ``-DiffCoder``, and
    ``confidence_threshold`` of Nemotron-Labs-Diffusion. Stable-DiffCoder also limits the steps of a
    block, and leaves masks in it when they are used up; here the last step decides all.
    """

    name: str = "ConfidenceThreshold"
    config: type[AlgorithmConfig] = ConfidenceThresholdConfig
    presets: Mapping[str, Mapping[str, float]] = MappingProxyType(
        {"DiffCoder": MappingProxyType({"threshold": 0.95})}
    )
    reads_decided: bool = False
    in_blocks: bool = True
    own_confidence: bool = True

    def step(self, canvas: Canvas, context: StepContext) -> Update:
        """See `Algorithm.step`."""
        sure = context.statistics.probability >= context.parameters["threshold"][:, None]
        return reveal(canvas, context, sure)


@dataclass(frozen=True)
class LinearSpecConfig(AlgorithmConfig):
    """Settings of `LinearSpec`."""

    threshold: float = setting(
        0.0, "draft what is at least this sure; 0 drafts the whole canvas in one step"
    )


class LinearSpec(Algorithm):
    """Greedy autoregressive decoding, several tokens at a time, with the model as its own drafter.

    A canvas begins with the last known token. Steps draft it, and decide as `ConfidenceThreshold`
    does. When nothing is masked, the commit, which is causal, predicts v_i from its row i, the
    token after position i. With x the drafted canvas and c the largest number for which::

        v_i = x_(i+1)   for all i < c

    the tokens v_0 ... v_c leave, and v_c begins the next canvas. They are those of greedy
    autoregressive decoding, because each is the argmax of a causal pass over the ones before it.

    Source: ``linear_spec_generate`` of Nemotron-Labs-Diffusion, whose drafting adapter
    (``linear_spec_lora``) is not applied.
    """

    name: str = "LinearSpec"
    config: type[AlgorithmConfig] = LinearSpecConfig
    samples: bool = False
    verifies: bool = True
    excludes: frozenset[Beside] = ALL_BESIDE

    step = ConfidenceThreshold.step


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

    Positions of one run depend on each other most; cutting a run in its middle halves it, so that a
    canvas needs about log2 of its length in steps.

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
        return reveal(canvas, context, accept)


def best_of_runs(masked: torch.Tensor, sureness: torch.Tensor) -> torch.Tensor:
    """The first position of the largest value in each run of ``masked``; bool ``[slots, L]``."""
    starts = masked.clone()
    starts[:, 1:] &= ~masked[:, :-1]
    run = starts.cumsum(1)  # [slots, L], of masked positions the number of their run
    same = masked[:, None, :] & (run[:, :, None] == run[:, None, :])
    return masked & ~(same & precedes(sureness)).any(2)


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
    has to be. The sums are those of ``1 - p``, in float32.

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
