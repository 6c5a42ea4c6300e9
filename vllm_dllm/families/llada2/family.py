"""LLaDA2.x: mixture-of-experts models with masked canvases and a block-causal mask."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from vllm_dllm.families.block_causal.family import BlockCausalFamily
from vllm_dllm.families.config_fields import Fields, hf_overrides
from vllm_dllm.families.llada2.hf_config import FIELDS, contradictions
from vllm_dllm.ranges import SettingsError

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class LLaDA2(BlockCausalFamily):
    """LLaDA2.0 and 2.1, mini and flash."""

    architecture: ClassVar[str] = "LLaDA2MoeModelLM"
    fields: ClassVar[Fields] = FIELDS
    several_blocks: ClassVar[bool] = True

    def configure(self, vllm_config: VllmConfig) -> None:
        """See `Family.configure`."""
        model = vllm_config.model_config
        # Checkpoints state a window that their model never applies; vLLM would apply it.
        model.hf_config.sliding_window = vllm_config.cache_config.sliding_window = None
        model.hf_config.complete()  # once more, because `--hf-overrides` may have set null
        super().configure(vllm_config)
        for sentence in contradictions(model.hf_config):
            given = any(f"{name}=" in sentence for name in hf_overrides(model))
            raise SettingsError(f"{'--hf-overrides' if given else 'config.json'}: {sentence}")
