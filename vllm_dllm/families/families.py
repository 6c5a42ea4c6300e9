"""What differs between the models that share `DiffusionModelState`.

A family says what a canvas is, which attention rule and which statistics its model needs,
and what is known of it before any request. Everything else is the same code for all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from vllm.config.compilation import CompilationMode
from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

from vllm_dllm.attention.metadata import AttentionRule
from vllm_dllm.decoding import Corruption, get_algorithm
from vllm_dllm.families.diffusion_gemma.attention import (
    CausalUnlessDenoised,
    causal_unless_denoised_rules,
)
from vllm_dllm.families.diffusion_gemma.input_embeddings import InputEmbeddings
from vllm_dllm.families.diffusion_gemma.self_conditioning import SelfConditioning
from vllm_dllm.families.llada2.attention import BlockCausal, block_causal_rules
from vllm_dllm.ops.attention.masks import WindowRule
from vllm_dllm.settings.parsing import (
    STEPS,
    DllmSettings,
    parse_checkpoint,
    parse_sampler,
    parse_settings,
)
from vllm_dllm.settings.ranges import SettingsError
from vllm_dllm.settings.resolution import CHECKPOINT, DEFAULT, SERVER, Served, parameter_names
from vllm_dllm.worker.fused_commit import fuses
from vllm_dllm.worker.logits_pipeline import WholeRows
from vllm_dllm.worker.masked_kernels import (
    MaskedKernels,
    PlainKernels,
    RowFunctions,
    ShardKernels,
)
from vllm_dllm.worker.plan import Policy
from vllm_dllm.worker.readout_ways import (
    MaskedStatistics,
    SampledKernels,
    Statistics,
    TiledStatistics,
)
from vllm_dllm.worker.slots import CanvasKind, SlotState

if TYPE_CHECKING:
    from vllm.config import VllmConfig

OWN_ALGORITHMS = {
    "LLaDA2MoeModelLM": "LowConfidence",
    "DiffusionGemmaForBlockDiffusion": "EntropyBound",
}


@dataclass(frozen=True)
class Family:
    """One model's parts.

    Attributes:
        kind: what its canvases are.
        served: what is known before any request.
        policy: when its canvases leave.
        attention: makes the attention rule; with True, the one for our own backend.
        statistics: makes the way from hidden states to row statistics, and the requests that
            need whole rows.
        embeddings: makes the input embeddings, or None where token ids are the input.
    """

    kind: CanvasKind
    served: Served
    policy: Policy
    attention: Callable[[SlotState, bool], AttentionRule]
    statistics: Callable[[nn.Module, SlotState], tuple[Statistics, WholeRows]]
    embeddings: Callable[[Any], InputEmbeddings | None]


def is_masked(vllm_config: VllmConfig) -> bool:
    """Whether the model's canvases start as masks, rather than as uniform noise."""
    return vllm_config.model_config.architecture == "LLaDA2MoeModelLM"


def compiles(vllm_config: VllmConfig) -> bool:
    """Whether vLLM compiles the model to kernels; what follows the model is compiled if it does."""
    compilation = vllm_config.compilation_config
    return bool(compilation.mode != CompilationMode.NONE and compilation.backend == "inductor")


def corruption_of(vllm_config: VllmConfig) -> Corruption:
    """What the model's canvases are full of."""
    return "mask" if is_masked(vllm_config) else "uniform"


def settings_of(vllm_config: VllmConfig) -> DllmSettings:
    """The server's settings; raises `SettingsError`."""
    corruption = corruption_of(vllm_config)

    def parameters_with(algorithm: object) -> set[str]:
        if isinstance(algorithm, str) and ":" in algorithm:
            get_algorithm(algorithm, corruption)  # registers it
        return parameter_names(corruption)

    return parse_settings(vllm_config.additional_config, parameters_with)


def served_of(vllm_config: VllmConfig) -> Served:
    """What is known before any request; the canvas length must have been settled.

    Raises:
        SettingsError: a setting or a field of the checkpoint is unknown or out of range.
    """
    settings, corruption = settings_of(vllm_config), corruption_of(vllm_config)
    masked = is_masked(vllm_config)
    stated = generation_config(vllm_config)
    names = parameter_names(corruption)
    diffusion = vllm_config.diffusion_config
    if diffusion.max_denoising_steps is not None:
        STEPS.check("--diffusion-config: max_denoising_steps", diffusion.max_denoising_steps)
    served = Served(
        corruption=corruption,
        own_algorithm=OWN_ALGORITHMS[vllm_config.model_config.architecture],
        settings=settings,
        checkpoint=parse_checkpoint(stated, names) if masked else parse_sampler(stated),
        length=diffusion.canvas_length,
        max_steps=settings.max_steps or diffusion.max_denoising_steps,
        mask_token=vllm_config.model_config.hf_config.mask_token_id if masked else None,
    )
    served.choose()
    return served


def generation_config(vllm_config: VllmConfig) -> dict[str, Any]:
    """What the checkpoint's ``generation_config.json`` says, empty without one.

    Raises:
        SettingsError: there is a file that is no JSON object; vLLM would pass it over.
    """
    model = vllm_config.model_config
    file = Path(model.model) / "generation_config.json"
    if file.is_file():
        try:
            whole = isinstance(json.loads(file.read_text()), dict)
        except ValueError:
            whole = False
        if not whole:
            raise SettingsError(f"generation_config.json of {model.model} is no JSON object")
    return model.try_get_generation_config()


def length_source(vllm_config: VllmConfig, diffusion: Mapping[str, Any] | None) -> str:
    """Where the canvas length comes from; ``diffusion`` is what ``--diffusion-config`` said."""
    if (diffusion or {}).get("canvas_length"):
        return SERVER
    model = vllm_config.model_config
    stated = get_hf_file_to_dict("config.json", model.model, model.revision) or {}
    names = ("block_length", "canvas_length", "block_size")
    return CHECKPOINT if any(stated.get(name) for name in names) else DEFAULT


def family_of(vllm_config: VllmConfig) -> Family:
    """The family of the model that is being served."""
    make = _llada2 if is_masked(vllm_config) else _diffusion_gemma
    return make(vllm_config, served_of(vllm_config))


def _policy(vllm_config: VllmConfig, served: Served, *, in_place: bool) -> Policy:
    settings = served.settings
    return Policy(
        sync=settings.execution == "sync",
        early=settings.eos_early_stop is not False,
        skip_last_commit=settings.skip_last_commit,
        in_place=in_place,
        fused=fuses(vllm_config, settings),
    )


def _llada2(vllm_config: VllmConfig, served: Served) -> Family:
    model_config = vllm_config.model_config
    vocabulary = model_config.get_vocab_size()
    mask = model_config.hf_config.mask_token_id

    def statistics(model: Any, slots: SlotState) -> tuple[Statistics, WholeRows]:
        whole = WholeRows(slots, vocabulary, model_config.logprobs_mode)
        functions = RowFunctions.compiled() if compiles(vllm_config) else RowFunctions()
        kernels: MaskedKernels = PlainKernels(functions)
        if not model.has_head:
            pass  # an earlier pipeline stage
        elif served.settings.kernels == "triton":
            from vllm_dllm.worker.triton_statistics import TritonKernels

            kernels = TritonKernels(functions, model.tiled_head())
        elif vllm_config.parallel_config.tensor_parallel_size > 1 and model.has_plain_head:
            kernels = ShardKernels(functions, model.tiled_head())
        return MaskedStatistics(model.head, whole, vocabulary, kernels), whole

    def attention(slots: SlotState, ruled: bool) -> AttentionRule:
        if not ruled:
            return BlockCausal(served.length, slots.device)
        return block_causal_rules(slots)

    return Family(
        kind=CanvasKind(served.length, vocabulary, mask, aligned=True),
        served=served,
        policy=_policy(vllm_config, served, in_place=True),
        attention=attention,
        statistics=statistics,
        embeddings=lambda state: None,
    )


def _diffusion_gemma(vllm_config: VllmConfig, served: Served) -> Family:
    model_config = vllm_config.model_config
    vocabulary = model_config.get_vocab_size()

    def statistics(model: Any, slots: SlotState) -> tuple[Statistics, WholeRows]:
        head = model.tiled_head()
        whole = WholeRows(slots, vocabulary, model_config.logprobs_mode, head)
        kernels = SampledKernels.compiled() if compiles(vllm_config) else SampledKernels()
        if served.settings.kernels == "triton":
            from vllm_dllm.ops.statistics.soft_embedding_triton import fused_statistics

            kernels = replace(kernels, statistics=fused_statistics)
        return TiledStatistics(head, whole, kernels), whole

    def embeddings(state: Any) -> InputEmbeddings:
        hidden = model_config.hf_text_config.hidden_size
        scale = state.model.model.normalizer
        module = state.model.self_conditioning
        return InputEmbeddings(state, SelfConditioning(state.slots, hidden, module, scale))

    def attention(slots: SlotState, ruled: bool) -> AttentionRule:
        if not ruled:
            return CausalUnlessDenoised(slots)
        return causal_unless_denoised_rules(slots, WindowRule[served.settings.window.upper()])

    return Family(
        kind=CanvasKind(served.length, vocabulary, None, aligned=False),
        served=served,
        # Its denoise pass is self-conditioned and not causal, its commit is neither.
        policy=_policy(vllm_config, served, in_place=False),
        attention=attention,
        statistics=statistics,
        embeddings=embeddings,
    )
