"""Which models are ours, and how vLLM and transformers come to know their classes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_dllm.settings.parsing import native_gemma

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

LLADA2, DIFFUSION_GEMMA = "LLaDA2MoeModelLM", "DiffusionGemmaForBlockDiffusion"


def served_architectures() -> tuple[str, ...]:
    """The architectures that this package serves in this environment."""
    return (LLADA2,) if native_gemma() else (LLADA2, DIFFUSION_GEMMA)


def is_ours(model_config: ModelConfig | None) -> bool:
    """Whether this package serves the model."""
    return model_config is not None and model_config.architecture in served_architectures()


def is_diffusion(vllm_config: VllmConfig) -> bool:
    """Whether vLLM takes the model for a diffusion model, be it ours or one of vLLM's own."""
    return vllm_config.model_config is not None and vllm_config.model_config.is_diffusion


def register_models() -> None:
    """Tell vLLM and transformers about our classes.

    The classes of models are registered by their paths: importing them would import torch modules
    that a front-end process does not need.
    """
    from transformers import AutoConfig
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from vllm_dllm.families.diffusion_gemma.startup import (
        DiffusionGemmaCheckpointConfig,
        DiffusionGemmaEngineConfig,
    )
    from vllm_dllm.families.llada2.hf_config import LLaDA2MoeConfig
    from vllm_dllm.startup.checks import LLaDA2EngineConfig

    if not AttentionBackendEnum.CUSTOM.is_overridden():
        register_backend(
            AttentionBackendEnum.CUSTOM, "vllm_dllm.attention.backend.MaskAttentionBackend"
        )
    AutoConfig.register(LLaDA2MoeConfig.model_type, LLaDA2MoeConfig, exist_ok=True)
    ModelRegistry.register_model(LLADA2, "vllm_dllm.families.llada2.model:LLaDA2MoeModelLM")
    MODELS_CONFIG_MAP[LLADA2] = LLaDA2EngineConfig
    if native_gemma():
        MODELS_CONFIG_MAP[DIFFUSION_GEMMA] = DiffusionGemmaCheckpointConfig
        return
    own = "vllm_dllm.families.diffusion_gemma.model:DiffusionGemmaForBlockDiffusion"
    ModelRegistry.register_model(DIFFUSION_GEMMA, own)
    MODELS_CONFIG_MAP[DIFFUSION_GEMMA] = DiffusionGemmaEngineConfig
