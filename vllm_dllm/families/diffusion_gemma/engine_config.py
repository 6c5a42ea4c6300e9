"""Start-up of DiffusionGemma: checks of its checkpoint, and the engine's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.model_executor.models.config import DiffusionGemmaModelForBlockDiffusionConfig

from vllm_dllm.attention.routes import LayerShape, ModelAttention
from vllm_dllm.attention.served_route import apply_route
from vllm_dllm.families.config_fields import (
    hf_overrides,
    source_of,
    stated_fields,
    warn_of_unread_fields,
)
from vllm_dllm.families.diffusion_gemma.config_fields import unknown_gemma_fields
from vllm_dllm.families.generation_config import generation_settings
from vllm_dllm.families.served import configure_engine
from vllm_dllm.ranges import SettingsError, listed, shown
from vllm_dllm.settings.resolution import (
    BOUND,
    MAX_STEPS_FIELD,
    OVERRIDE,
    SAMPLER,
    SAMPLER_FIELDS,
    Served,
)
from vllm_dllm.settings.server import STEPS, DllmSettings, native_gemma
from vllm_dllm.startup.checks import (
    check_budget,
    check_quantization,
    log_choice,
    refuse_unsupported,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_dllm.families.base import Family

# The numbers of soft tokens that Gemma 4's image processor supports, and the one that vLLM requests
# for a video frame.
SOFT_TOKENS = (70, 140, 280, 560, 1120)
VIDEO_SOFT_TOKENS = 70
SAMPLER_CLASS = "EntropyBoundSamplerConfig"


def check_checkpoint(vllm_config: VllmConfig, family: Family) -> None:
    """Refuse an incomplete checkpoint, naming the missing field, then run vLLM's own start-up.

    Raises:
        SettingsError: ``canvas_length`` or a field of the sampler is missing or out of range, or
            the vision encoder cannot read what the options promise.
    """
    check_canvas_length(vllm_config)
    check_pictures(vllm_config)
    stated, elsewhere = generation_settings(vllm_config, family)
    Served(
        family.corruption, family.algorithm, DllmSettings(), stated, elsewhere=elsewhere
    ).choose()
    if native_gemma() and OVERRIDE in elsewhere.values():
        names = sorted(name for name, source in elsewhere.items() if source == OVERRIDE)
        raise SettingsError(
            f"{OVERRIDE}: vLLM's own class (VLLM_DLLM_NATIVE=1) does not read {listed(names)} from "
            "there; write a generation_config.json, and name its folder with --generation-config"
        )
    DiffusionGemmaModelForBlockDiffusionConfig.verify_and_update_config(vllm_config)
    if not vllm_config.diffusion_config.canvas_length:
        # `--diffusion-config` may set other options and leave the length to the checkpoint.
        length = vllm_config.model_config.hf_config.canvas_length
        vllm_config.diffusion_config.canvas_length = length


def configure(vllm_config: VllmConfig, family: Family) -> None:
    """Complete vLLM's configuration for this package's class; refuse options that cannot work.

    Raises:
        ValueError: an option cannot work; the message names it and the remedy.
    """
    refuse_unsupported(vllm_config)
    model = vllm_config.model_config
    unread = unknown_gemma_fields(stated_fields(model), hf_overrides(model))
    warn_of_unread_fields(model, unread, family.corruption)
    check_quantization(vllm_config)
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        raise SettingsError(
            "--pipeline-parallel-size: vLLM's DiffusionGemma has no pipeline stages, and the "
            "first would need what the last one predicted; use --tensor-parallel-size"
        )
    seats = vllm_config.scheduler_config.max_num_seqs
    chosen = vllm_config.attention_config.backend
    check_checkpoint(vllm_config, family)
    # vLLM has chosen a backend for its own class, by rules that do not apply to this package's
    # class.
    vllm_config.attention_config.backend = chosen
    # vLLM's class holds whole rows of logits and therefore serves at most 8 requests.
    vllm_config.scheduler_config.max_num_seqs = seats
    served = configure_engine(vllm_config, family)
    if served.settings.eos_early_stop is not None:
        raise SettingsError(
            "dllm.eos_early_stop is for canvases whose decided positions stay as they are, "
            "which DiffusionGemma's do not; remove it"
        )
    dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
    layers = layer_shapes(vllm_config)
    apply_route(
        vllm_config, ModelAttention(False, served.length, layers, served.settings.window, dtype)
    )
    check_budget(vllm_config, served.length)
    log_choice(served, f"canvas length {served.length}, {seats} requests at a time")


def parse_sampler(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of DiffusionGemma's sampler and ``max_denoising_steps``, by name.

    Raises:
        SettingsError: a field is missing; the message names it. Ranges are checked where settings
            are resolved.
    """
    sampler = generation_config.get(SAMPLER)
    if not isinstance(sampler, Mapping):
        raise SettingsError(f"generation_config.json has no {SAMPLER!r}")
    if sampler.get("_cls_name") != SAMPLER_CLASS:
        raise SettingsError(
            f"generation_config.json: {SAMPLER}._cls_name must be {SAMPLER_CLASS!r}, got "
            f"{shown(sampler.get('_cls_name'))}"
        )
    values: dict[str, Any] = {
        name: generation_config.get(name) for name in (MAX_STEPS_FIELD, *SAMPLER_FIELDS)
    }
    values[f"{SAMPLER}.{BOUND}"] = sampler.get(BOUND)
    for name, value in values.items():
        if value is None:
            raise SettingsError(f"generation_config.json has no {name!r}")
    return {name.removeprefix(f"{SAMPLER}."): value for name, value in values.items()}


def check_canvas_length(vllm_config: VllmConfig) -> None:
    """Check that the canvas length is given: transformers would silently use 256.

    Raises:
        SettingsError: it is missing or out of range.
    """
    model, diffusion = vllm_config.model_config, vllm_config.diffusion_config
    if diffusion is not None and diffusion.canvas_length:
        return
    length = stated_fields(model).get("canvas_length")
    if length is None:
        raise SettingsError(
            f"config.json of {model.model} has no 'canvas_length'; pass "
            "--diffusion-config '{\"canvas_length\": L}' with the length it was trained with"
        )
    STEPS.check(f"{source_of('canvas_length', hf_overrides(model))}: canvas_length", length)


def check_pictures(vllm_config: VllmConfig) -> None:
    """Check that the vision encoder can read pictures of any shape with the given options.

    Raises:
        SettingsError: an option allows what it cannot read.
    """
    options = vllm_config.model_config.multimodal_config
    if options is None:
        return
    if options.enable_mm_embeds:
        raise SettingsError(
            "--enable-mm-embeds: DiffusionGemma reads pictures, not their embeddings; remove it"
        )
    vision = vllm_config.model_config.hf_config.vision_config
    given = options.mm_processor_kwargs or {}
    given = (given.get("images_kwargs") or {}) | given
    usual = getattr(vision, "default_output_length", 280)
    tokens = {
        "image": given.get("max_soft_tokens", usual),
        "video": VIDEO_SOFT_TOKENS,
    }
    for modality, most in tokens.items():
        # The longest possible picture is one embedding high.
        widest = most * vision.pooling_kernel_size
        if options.get_limit_per_prompt(modality) and widest > vision.position_embedding_size:
            fits = vision.position_embedding_size // vision.pooling_kernel_size
            fitting = max((size for size in SOFT_TOKENS if size <= fits), default=None)
            remedy = f"--limit-mm-per-prompt '{{\"{modality}\": 0}}'"
            if modality == "image" and fitting is not None:
                remedy = f"--mm-processor-kwargs '{{\"max_soft_tokens\": {fitting}}}' or {remedy}"
            raise SettingsError(
                f"max_soft_tokens={most}: of such {modality}s one may be {widest} patches wide, "
                f"and the checkpoint has {vision.position_embedding_size} positions "
                f"(vision_config.position_embedding_size); pass {remedy}"
            )


def layer_shapes(vllm_config: VllmConfig) -> tuple[LayerShape, ...]:
    """The different shapes of the model's attention layers, as its checkpoint states them."""
    model = vllm_config.model_config
    text = model.hf_text_config
    shapes = {
        LayerShape(
            model.model_arch_config[layer].head_size,
            text.sliding_window if kind == "sliding_attention" else None,
        ): None
        for layer, kind in enumerate(text.layer_types)
    }
    return tuple(shapes)
