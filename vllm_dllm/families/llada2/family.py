"""LLaDA2.x: mixture-of-experts models with masked canvases and a block-causal mask."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from vllm_dllm.checkpoints.config_fields import unknown_fields
from vllm_dllm.families.block_causal.family import BlockCausalFamily
from vllm_dllm.families.llada2.hf_config import KNOWN_FIELDS, LLaDA2MoeConfig
from vllm_dllm.startup.config_fields import stated_fields
from vllm_dllm.startup.quantization import check_quantization

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class LLaDA2(BlockCausalFamily):
    """LLaDA2.0 and 2.1, mini and flash."""

    architecture: ClassVar[str] = "LLaDA2MoeModelLM"
    model_class: ClassVar[str] = "vllm_dllm.families.llada2.model:LLaDA2MoeModelLM"

    def register(self) -> None:
        """See `Family.register`: transformers does not know the configuration class."""
        from transformers import AutoConfig

        AutoConfig.register(LLaDA2MoeConfig.model_type, LLaDA2MoeConfig, exist_ok=True)

    def configure(self, vllm_config: VllmConfig) -> None:
        """See `Family.configure`."""
        check_quantization(vllm_config)
        # Checkpoints state a window that their model never applies; vLLM would apply it.
        hf_config = vllm_config.model_config.hf_config
        hf_config.sliding_window = vllm_config.cache_config.sliding_window = None
        super().configure(vllm_config)

    def unread_fields(self, vllm_config: VllmConfig) -> list[str]:
        """See `BlockCausalFamily.unread_fields`."""
        return unknown_fields(stated_fields(vllm_config.model_config), KNOWN_FIELDS)
