"""LinearSpec: a draft of the whole canvas, of which a causal pass keeps what it predicts itself."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_dllm.decoding.base import (
    ALL_BESIDE,
    Algorithm,
    Beside,
    Canvas,
    StepContext,
    Update,
    reveal,
)
from vllm_dllm.ranges import AlgorithmConfig, setting


@dataclass(frozen=True)
class LinearSpecConfig(AlgorithmConfig):
    """Settings of `LinearSpec`."""

    threshold: float = setting(
        0.0, "draft what is at least this sure; 0 drafts the whole canvas in one step"
    )


class LinearSpec(Algorithm):
    """Greedy autoregressive decoding, several tokens at a time, with the model as its own drafter.

    A canvas begins with the last known token. With M the masked positions, x the argmax and p its
    probability, a step drafts::

        {i in M : p_i >= threshold}   or, when that is empty,   {argmax over M of p_i}

    When nothing is masked, the commit, which is causal, predicts v_i from its row i, the token
    after position i. With x the drafted canvas and c the largest number for which::

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

    def step(self, canvas: Canvas, context: StepContext) -> Update:
        """See `Algorithm.step`."""
        sure = context.statistics.probability >= context.parameters["threshold"][:, None]
        return reveal(canvas, context, sure)
