"""LLaDA2.x: mixture-of-experts models with masked canvases and a block-causal mask."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from vllm_dllm.families.block_causal.family import BlockCausalFamily
from vllm_dllm.families.config_fields import stated_fields, unknown_fields
from vllm_dllm.families.llada2.hf_config import KNOWN_FIELDS
from vllm_dllm.startup.checks import check_quantization

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class LLaDA2(BlockCausalFamily):
    """LLaDA2.0 and 2.1, mini and flash."""

    architecture: ClassVar[str] = "LLaDA2MoeModelLM"

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
