"""Know which models are ours, and register their classes with vLLM and transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_dllm.families.registry import families, served_architectures
from vllm_dllm.startup.refusal import refusing_readably

if TYPE_CHECKING:
    from vllm.config import ModelConfig


def is_ours(model_config: ModelConfig | None) -> bool:
    """Whether this package serves the model."""
    return model_config is not None and model_config.architecture in served_architectures()


def register_models() -> None:
    """Register our classes with vLLM and transformers.

    The model classes are registered by their paths, because importing them would import torch
    modules that a front-end process does not need.
    """
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if not AttentionBackendEnum.CUSTOM.is_overridden():
        register_backend(
            AttentionBackendEnum.CUSTOM, "vllm_dllm.attention.backend.MaskAttentionBackend"
        )
    for architecture, family in families().items():
        family.register()
        if not family.left_to_vllm:
            ModelRegistry.register_model(architecture, family.model_class)
        hook = {"verify_and_update_config": staticmethod(refusing_readably(family.configure))}
        MODELS_CONFIG_MAP[architecture] = type("EngineConfig", (VerifyAndUpdateConfig,), hook)
