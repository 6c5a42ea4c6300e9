"""Start-up of a masked model: its block length, its mask token, and a context of whole blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.config import DiffusionConfig
from vllm.logger import init_logger

from vllm_dllm.attention.routes import LayerShape, ModelAttention
from vllm_dllm.attention.served_route import apply_route
from vllm_dllm.families.config_fields import hf_overrides, source_of, warn_of_unread_fields
from vllm_dllm.families.served import configure_engine
from vllm_dllm.ranges import SettingsError
from vllm_dllm.settings.resolution import HF_OVERRIDES
from vllm_dllm.settings.server import LENGTH, LENGTHS
from vllm_dllm.startup.checks import check_budget, log_choice, refuse_unsupported

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

    from vllm_dllm.families.block_causal.family import BlockCausalFamily

logger = init_logger("vllm.dllm")


def configure(vllm_config: VllmConfig, family: BlockCausalFamily, unread: list[str]) -> None:
    """Fill in what a masked model needs, and refuse what cannot work.

    Args:
        vllm_config: vLLM's configuration, before anything is allocated.
        family: the model's family.
        unread: fields of ``config.json`` that are ignored.

    Raises:
        ValueError: with the setting's name and the remedy.
    """
    length = block_length(vllm_config)
    refuse_sliding_window(vllm_config.model_config)
    hf_config = vllm_config.model_config.hf_config
    hf_config.canvas_length = length
    hf_config.mask_token_id = resolve_mask_token(vllm_config.model_config, family.mask_spellings)
    if vllm_config.diffusion_config is None:
        vllm_config.diffusion_config = DiffusionConfig(canvas_length=length)
    vllm_config.diffusion_config.canvas_length = length

    refuse_unsupported(vllm_config)
    warn_of_unread_fields(vllm_config.model_config, unread, family.corruption)
    check_budget(vllm_config, length)
    align_context(vllm_config, length)
    model = vllm_config.model_config
    dtype = str(model.dtype).removeprefix("torch.")
    layers = (LayerShape(model.get_head_size()),)
    apply_route(vllm_config, ModelAttention(True, length, layers, dtype=dtype))
    served = configure_engine(vllm_config, family)
    if served.settings.window != "symmetric":
        name = type(family).__name__
        raise SettingsError(
            f"dllm.window is for sliding-window layers, and {name} has none; remove it"
        )
    greedy_by_default(vllm_config.model_config, family)
    log_choice(served, f"block length {length}, mask token {hf_config.mask_token_id}")


def block_length(vllm_config: VllmConfig) -> int:
    """L as given by ``--diffusion-config``, or else by the checkpoint.

    Raises:
        SettingsError: the checkpoint states no length, two lengths, or one out of range.
    """
    if vllm_config.diffusion_config is not None and vllm_config.diffusion_config.canvas_length:
        return vllm_config.diffusion_config.canvas_length
    config = vars(vllm_config.model_config.hf_config)
    stated, canvas = config.get("block_length"), config.get("canvas_length")
    overrides = hf_overrides(vllm_config.model_config)
    if None not in (stated, canvas) and stated != canvas:
        source = HF_OVERRIDES if overrides.keys() & set(LENGTHS) else "config.json"
        raise SettingsError(
            f"{source}: block_length={stated} contradicts canvas_length={canvas}; give both the "
            "same, or pass --diffusion-config '{\"canvas_length\": L}'"
        )
    length = canvas if stated is None else stated
    if length is None:
        raise SettingsError(
            f"config.json of {vllm_config.model_config.model} has no 'canvas_length'; pass "
            "--diffusion-config '{\"canvas_length\": L}' with the block length that it was "
            "trained with"
        )
    LENGTH.check(f"{source_of('canvas_length', overrides)}: canvas_length", length)
    return length


def refuse_sliding_window(model_config: ModelConfig) -> None:
    """Refuse a checkpoint that needs a sliding window, which the attention of masked models lacks.

    Raises:
        SettingsError: names the window and the remedy.
    """
    window = model_config.get_sliding_window()
    if window is not None:
        raise SettingsError(
            f"config.json: sliding_window={window}: block-causal attention has no sliding window; "
            "serve contexts that fit into it with --disable-sliding-window"
        )


def greedy_by_default(model_config: ModelConfig, family: BlockCausalFamily) -> None:
    """Make requests without a temperature greedy; vLLM's own default is 1.0.

    A family whose authors recommend sampling in ``generation_config.json`` keeps their values.
    """
    recommended = model_config.try_get_generation_config() if family.samples else {}
    if "temperature" not in recommended:
        model_config.override_generation_config.setdefault("temperature", 0.0)


def resolve_mask_token(model_config: ModelConfig, spellings: Sequence[str]) -> int:
    """The mask id: from ``config.json``, else the tokenizer's, else one of `spellings`."""
    vocabulary = model_config.get_vocab_size()
    mask = vars(model_config.hf_config).get("mask_token_id")
    if mask is None:
        mask = _mask_token_of_tokenizer(model_config, spellings)
    if mask is None:
        raise ValueError(
            f"no mask token: config.json of {model_config.model} has no 'mask_token_id' and its "
            f"tokenizer no mask token ({', '.join(map(repr, spellings))}). Pass "
            "--hf-overrides '{\"mask_token_id\": ID}'."
        )
    if isinstance(mask, bool) or not isinstance(mask, int) or not 0 <= mask < vocabulary:
        raise ValueError(
            f"mask_token_id {mask!r} is not a token id in [0, {vocabulary}); correct config.json, "
            "or pass --hf-overrides '{\"mask_token_id\": ID}'"
        )
    return mask


def _mask_token_of_tokenizer(model_config: ModelConfig, spellings: Sequence[str]) -> int | None:
    from vllm.tokenizers import cached_tokenizer_from_config

    if model_config.skip_tokenizer_init:
        raise ValueError(
            "no mask token: config.json has no 'mask_token_id' and skip_tokenizer_init leaves "
            "no tokenizer to ask. Pass hf_overrides={'mask_token_id': ID}."
        )
    tokenizer = cached_tokenizer_from_config(model_config)
    declared = getattr(tokenizer, "mask_token_id", None)
    if declared is not None:
        return declared
    vocabulary = tokenizer.get_vocab()
    return next((vocabulary[text] for text in spellings if text in vocabulary), None)


def align_context(vllm_config: VllmConfig, length: int) -> None:
    """Round ``max_model_len`` down, or refuse it, because the context holds only whole blocks."""
    model = vllm_config.model_config
    if model.max_model_len < length:
        raise ValueError(
            f"max_model_len={model.max_model_len} is below the block length {length}; "
            f"set --max-model-len to at least {length}"
        )
    whole = model.max_model_len - model.max_model_len % length
    if whole != model.max_model_len:
        logger.warning(
            "dllm: max_model_len %d is not a multiple of the block length %d; serving %d",
            model.max_model_len,
            length,
            whole,
        )
        model.max_model_len = whole
