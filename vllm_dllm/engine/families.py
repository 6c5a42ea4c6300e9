"""What differs between the models that share `DiffusionModelState`.

A family says what a canvas is, which attention rule and which statistics its model needs,
and what a request gets by default. Everything else is the same code for all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vllm_dllm.config import parse_generation_config, parse_settings, refuse_foreign
from vllm_dllm.decoding import Algorithm, get_algorithm
from vllm_dllm.engine.attention import AttentionRule, BlockCausal, CausalUnlessDenoised
from vllm_dllm.engine.choices import RequestDefaults
from vllm_dllm.engine.embeddings import InputEmbeddings
from vllm_dllm.engine.requests import CanvasKind, SlotState
from vllm_dllm.engine.self_conditioning import SelfConditioning
from vllm_dllm.engine.statistics import GreedyStatistics, Statistics, TemperedStatistics
from vllm_dllm.engine.whole_rows import WholeRows

if TYPE_CHECKING:
    from vllm.config import VllmConfig

DEFAULT_ALGORITHMS = {
    "LLaDA2MoeModelLM": "LowConfidence",
    "DiffusionGemmaForBlockDiffusion": "EntropyBound",
}
DEFAULT_THRESHOLD = 0.95


@dataclass(frozen=True)
class Family:
    """One model's parts.

    Attributes:
        kind: what its canvases are.
        algorithm: the server's decoding algorithm.
        defaults: what a request gets when it does not choose.
        attention: makes the attention rule.
        statistics: makes the way from hidden states to row statistics; with the requests that
            need whole rows, where the family has that path.
        embeddings: makes the input embeddings, or None where token ids are the input.
        window: how a canvas sees sliding-window layers, one of `config.WINDOWS`.
    """

    kind: CanvasKind
    algorithm: Algorithm
    defaults: RequestDefaults
    attention: Callable[[SlotState], AttentionRule]
    statistics: Callable[[nn.Module, SlotState], tuple[Statistics, WholeRows | None]]
    embeddings: Callable[[Any], InputEmbeddings | None]
    window: str = "symmetric"


def server_algorithm(vllm_config: VllmConfig) -> Algorithm:
    """The server's decoding algorithm: its settings', else the model's own.

    Raises:
        ValueError: there is none of that name, or a setting belongs to another algorithm.
    """
    settings = parse_settings(vllm_config.additional_config)
    own = DEFAULT_ALGORITHMS[vllm_config.model_config.architecture]
    algorithm = get_algorithm(settings.algorithm or own)
    if algorithm.samples != get_algorithm(own).samples:
        raise ValueError(f"{algorithm.name} does not fit this model; use {own}")
    refuse_foreign("dllm.", settings.parameters, algorithm.name, algorithm.parameters)
    return algorithm


def family_of(vllm_config: VllmConfig) -> Family:
    """The family of the model that is being served."""
    if vllm_config.model_config.architecture == "LLaDA2MoeModelLM":
        return _llada2(vllm_config)
    return _diffusion_gemma(vllm_config)


def _llada2(vllm_config: VllmConfig) -> Family:
    settings = parse_settings(vllm_config.additional_config)
    length = vllm_config.diffusion_config.canvas_length
    vocabulary = vllm_config.model_config.get_vocab_size()
    mask = vllm_config.model_config.hf_config.mask_token_id
    return Family(
        kind=CanvasKind(length, vocabulary, mask, aligned=True),
        algorithm=server_algorithm(vllm_config),
        defaults=RequestDefaults(
            parameters={"threshold": DEFAULT_THRESHOLD} | dict(settings.parameters),
            max_steps=step_cap(vllm_config),
            may_exceed_steps=True,
            eos_early_stop=settings.eos_early_stop is not False,
        ),
        attention=lambda slots: BlockCausal(length, slots.device),
        statistics=lambda model, slots: (GreedyStatistics(model.head, vocabulary, slots), None),
        embeddings=lambda state: None,
    )


def _diffusion_gemma(vllm_config: VllmConfig) -> Family:
    settings = parse_settings(vllm_config.additional_config)
    model_config = vllm_config.model_config
    length = vllm_config.diffusion_config.canvas_length
    vocabulary = model_config.get_vocab_size()
    published = parse_generation_config(model_config.try_get_generation_config())
    algorithm = server_algorithm(vllm_config)
    steps = step_cap(vllm_config)

    raw = model_config.logprobs_mode in ("raw_logits", "processed_logits")

    def statistics(model: nn.Module, slots: SlotState) -> tuple[Statistics, WholeRows]:
        whole = WholeRows(slots, model.tiled_head(), raw)
        return TemperedStatistics(whole, algorithm), whole

    def embeddings(state: Any) -> InputEmbeddings:
        hidden = model_config.hf_text_config.hidden_size
        scale: torch.Tensor = state.model.model.normalizer
        module = state.model.self_conditioning
        return InputEmbeddings(state, SelfConditioning(state.slots, hidden, module, scale))

    return Family(
        kind=CanvasKind(length, vocabulary, None, aligned=False),
        algorithm=algorithm,
        defaults=RequestDefaults(
            parameters={
                **published.parameters(),
                **settings.parameters,
                "schedule_steps": steps,
                "temperature": 1.0,
            },
            max_steps=steps,
            may_exceed_steps=False,
            eos_early_stop=False,
        ),
        attention=CausalUnlessDenoised,
        statistics=statistics,
        embeddings=embeddings,
        window=settings.window,
    )


def step_cap(vllm_config: VllmConfig) -> int:
    """Most denoise steps of a canvas: settings, ``--diffusion-config``, else the model's own."""
    settings = parse_settings(vllm_config.additional_config)
    given = settings.max_steps or vllm_config.diffusion_config.max_denoising_steps
    if given:
        return given
    if vllm_config.model_config.architecture == "LLaDA2MoeModelLM":
        return vllm_config.diffusion_config.canvas_length + 1
    published = parse_generation_config(vllm_config.model_config.try_get_generation_config())
    return published.max_denoising_steps
