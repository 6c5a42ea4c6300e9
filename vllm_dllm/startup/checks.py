"""Start-up: what a diffusion model needs of vLLM's configuration, set or refused by name."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from vllm.config import DiffusionConfig
from vllm.logger import init_logger
from vllm.model_executor.models.config import VerifyAndUpdateConfig

from vllm_dllm.attention.support import ModelMasks, check_backend_choice
from vllm_dllm.cpu.norms import prefer_compiled_norms
from vllm_dllm.families.families import served_of, settings_of
from vllm_dllm.families.llada2.hf_config import MASK_TOKEN
from vllm_dllm.settings.ranges import SettingsError
from vllm_dllm.settings.resolution import Served
from vllm_dllm.startup.config_fields import heed_every_name
from vllm_dllm.startup.quantization import check_quantization
from vllm_dllm.worker.fused_commit import fuses

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = init_logger("vllm.dllm")

SCHEDULER = "vllm_dllm.families.scheduling.make_scheduler"


def block_length(vllm_config: VllmConfig) -> int:
    """L: ``--diffusion-config``, else the checkpoint's, else the model's default."""
    if vllm_config.diffusion_config is not None and vllm_config.diffusion_config.canvas_length:
        return vllm_config.diffusion_config.canvas_length
    hf_config = vllm_config.model_config.hf_config
    stated, canvas = hf_config.block_length, hf_config.canvas_length
    if stated not in (None, canvas):
        raise SettingsError(
            f"config.json: block_length={stated} contradicts canvas_length={canvas}; give one, or "
            "both the same"
        )
    return canvas


class LLaDA2EngineConfig(VerifyAndUpdateConfig):
    """vLLM calls this once per engine configuration, before anything is allocated."""

    @classmethod
    def verify_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Fill in what LLaDA2 needs; refuse what cannot work.

        Raises:
            ValueError: with the setting's name and the remedy.
        """
        if settings_of(vllm_config).window != "symmetric":
            raise SettingsError("dllm.window is for sliding-window layers; LLaDA2 has none")
        length = block_length(vllm_config)
        hf_config = vllm_config.model_config.hf_config
        hf_config.canvas_length = length
        # Checkpoints state a window that their model never applies; vLLM would apply it.
        hf_config.sliding_window = vllm_config.cache_config.sliding_window = None
        hf_config.mask_token_id = resolve_mask_token(vllm_config.model_config)
        if vllm_config.diffusion_config is None:
            vllm_config.diffusion_config = DiffusionConfig(canvas_length=length)
        vllm_config.diffusion_config.canvas_length = length

        refuse_unsupported(vllm_config)
        heed_every_name(vllm_config, masked=True)
        check_quantization(vllm_config)
        check_backend_choice(vllm_config, ModelMasks(True, "symmetric", length))
        check_budget(vllm_config, length)
        align_context(vllm_config, length)
        align_pages(vllm_config, length)
        vllm_config.attention_config.use_non_causal = True
        vllm_config.scheduler_config.scheduler_cls = SCHEDULER
        served = served_of(vllm_config)
        check_kernels(served)
        fuses(vllm_config, served.settings)  # refuses what it can, before weights are read
        prefer_compiled_norms(vllm_config)
        vllm_config.model_config.dllm = served
        # LLaDA2's authors recommend greedy decoding; vLLM's own default would be 1.0.
        vllm_config.model_config.override_generation_config.setdefault("temperature", 0.0)
        log_choice(served, f"block length {length}, mask token {hf_config.mask_token_id}")


def check_kernels(served: Served) -> None:
    """Kernels must be able to run here.

    Raises:
        SettingsError: they are Triton's, and vLLM has no Triton.
    """
    from vllm.triton_utils import HAS_TRITON

    if served.settings.kernels == "triton" and not HAS_TRITON:
        raise SettingsError("dllm.kernels=triton: vLLM has no Triton here; remove it")


def log_choice(served: Served, canvas: str) -> None:
    """Say at start-up how requests that do not choose are decoded."""
    choice = served.choose()
    values = ", ".join(f"{name}={value:g}" for name, value in choice.settings.values().items())
    logger.info(
        "dllm: %s (%s), %s, up to %d steps a canvas, execution %s",
        choice.algorithm.name,
        values,
        canvas,
        choice.max_steps,
        served.settings.execution,
    )


def resolve_mask_token(model_config: ModelConfig) -> int:
    """The mask id: ``config.json``, else the tokenizer's mask token, else ``<|mask|>``."""
    vocabulary = model_config.get_vocab_size()
    mask = model_config.hf_config.mask_token_id
    if mask is None:
        mask = _mask_token_of_tokenizer(model_config)
    if mask is None:
        raise ValueError(
            f"no mask token: config.json of {model_config.model} has no 'mask_token_id' and its "
            f"tokenizer no mask token ('{MASK_TOKEN}'). Pass "
            "--hf-overrides '{\"mask_token_id\": ID}'."
        )
    if isinstance(mask, bool) or not isinstance(mask, int) or not 0 <= mask < vocabulary:
        raise ValueError(f"mask_token_id {mask!r} is not a token id in [0, {vocabulary})")
    return mask


def _mask_token_of_tokenizer(model_config: ModelConfig) -> int | None:
    from vllm.tokenizers import cached_tokenizer_from_config

    if model_config.skip_tokenizer_init:
        raise ValueError(
            "no mask token: config.json has no 'mask_token_id' and skip_tokenizer_init leaves "
            "no tokenizer to ask. Pass hf_overrides={'mask_token_id': ID}."
        )
    tokenizer = cached_tokenizer_from_config(model_config)
    declared = getattr(tokenizer, "mask_token_id", None)
    return declared if declared is not None else tokenizer.get_vocab().get(MASK_TOKEN)


def refuse_unsupported(vllm_config: VllmConfig) -> None:
    """Raise for every vLLM option that a diffusion model would otherwise get wrong or ignore."""
    from vllm import envs
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    scheduler = vllm_config.scheduler_config
    refusals: tuple[tuple[Any, str], ...] = (
        (
            envs.VLLM_USE_V2_MODEL_RUNNER is False,
            "VLLM_USE_V2_MODEL_RUNNER=0: diffusion models need Model Runner V2; unset it",
        ),
        (
            model.runner_type != "generate",
            f"--runner {model.runner_type}: a block-diffusion model fills canvases and has no "
            "pooler; serve it with --runner generate (or without --runner and --convert)",
        ),
        (
            vllm_config.speculative_config is not None,
            "--speculative-config: a diffusion model already proposes whole blocks; remove it",
        ),
        (
            scheduler.scheduler_cls is not None,
            f"--scheduler-cls {scheduler.scheduler_cls}: block-diffusion models need their own "
            "scheduler; remove it",
        ),
        (
            parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
            "context parallelism: not supported for diffusion models; use --tensor-parallel-size",
        ),
        (
            vllm_config.lora_config is not None and current_platform.is_cpu() and not HAS_TRITON,
            "--enable-lora: on the CPU vLLM applies LoRA to experts with Triton kernels, which "
            "are missing here; remove it, or merge the adapter into the checkpoint",
        ),
        (parallel.enable_dbo, "--enable-dbo: not supported for diffusion models; remove it"),
        (
            vllm_config.kv_transfer_config is not None,
            "--kv-transfer-config: not supported for diffusion models yet; remove it",
        ),
        (
            model.enable_prompt_embeds,
            "--enable-prompt-embeds: not supported for diffusion models; remove it",
        ),
        (model.logits_processors, "--logits-processors: not supported for diffusion models yet"),
        (
            vllm_config.structured_outputs_config.backend != "auto",
            "--structured-outputs-config.backend "
            f"{vllm_config.structured_outputs_config.backend}: grammar backends advance token by "
            "token, and canvases are not written so; remove it (constraints have an engine of "
            "their own)",
        ),
        (
            model.enable_trace_replay,
            "--enable-trace-replay: not supported for diffusion models; remove it",
        ),
    )
    for refused, message in refusals:
        if refused:
            raise ValueError(message)


def check_budget(vllm_config: VllmConfig, length: int) -> None:
    """A step must be able to hold one whole canvas."""
    scheduler = vllm_config.scheduler_config
    for name in (
        "max_num_batched_tokens",
        "max_num_scheduled_tokens",
        "long_prefill_token_threshold",
    ):
        value = getattr(scheduler, name)
        if value and value < length:
            raise ValueError(
                f"{name}={value} is below the block length {length}: no canvas would fit into a "
                f"step; set --{name.replace('_', '-')} to at least {length}"
            )


def align_context(vllm_config: VllmConfig, length: int) -> None:
    """The context holds whole blocks only: round ``max_model_len`` down, or refuse."""
    model = vllm_config.model_config
    if model.max_model_len < length:
        raise ValueError(
            f"max_model_len={model.max_model_len} is below the block length {length}; "
            f"set --max-model-len to at least {length}"
        )
    whole = model.max_model_len - model.max_model_len % length
    if whole != model.max_model_len:
        logger.warning(
            "dllm: max_model_len %d is no multiple of the block length %d; serving %d",
            model.max_model_len,
            length,
            whole,
        )
        model.max_model_len = whole


def align_pages(vllm_config: VllmConfig, length: int) -> None:
    """KV pages hold whole blocks: only then does prefix caching return final keys and values."""
    from vllm.platforms import current_platform

    cache = vllm_config.cache_config
    if cache.user_specified_block_size:
        if cache.block_size % length:
            raise ValueError(
                f"block_size={cache.block_size} is no multiple of the model's block length "
                f"{length}; leave --block-size out or set it to a multiple of {length}"
            )
        return
    # vLLM's default page (128 on the CPU, 16 elsewhere), rounded up to whole blocks and to
    # the granularity that its attention kernels take.
    default, granularity = (128, 32) if current_platform.is_cpu() else (16, 16)
    unit = math.lcm(length, granularity)
    cache.block_size = unit * math.ceil(default / unit)
    cache.user_specified_block_size = True
    logger.info("dllm: KV page size %d (block length %d)", cache.block_size, length)
