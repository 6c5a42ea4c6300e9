"""Fast-dLLM v2: Qwen2.5, trained to fill masked blocks of 32 and read as a causal model is."""

from typing import ClassVar

from huggingface_hub.dataclasses import strict
from transformers import Qwen2Config
from vllm.config import VllmConfig

from vllm_dllm.decoding.base import Beside
from vllm_dllm.families.block_causal.family import BlockCausalFamily
from vllm_dllm.families.config_fields import Fields, MaskedFields


@strict
class FastDLLMConfig(MaskedFields, Qwen2Config):
    """``model_type: Fast_dLLM_Qwen``."""

    model_type = "Fast_dLLM_Qwen"


FIELDS = Fields(
    FastDLLMConfig,
    # A field of the training (as it is spelled there), and what vLLM reads.
    frozenset({"conplemenrary_mask", "rope_theta", "rope_scaling"}),
    # What vLLM's Qwen2 would ignore, or do in a way that does not fit a canvas.
    {
        "is_causal": ((None, True), "attention without a cache"),
        "hidden_act": (("silu",), "another activation than SiLU"),
        "dual_chunk_attention_config": ((None,), "attention by chunks of the context"),
    },
)


class FastDLLM(BlockCausalFamily):
    """Fast-dLLM v2, 1.5B and 7B."""

    architecture: ClassVar[str] = "Fast_dLLM_QwenForCausalLM"
    algorithm: ClassVar[str] = "SubBlocks"
    shifted: ClassVar[bool] = True
    one_stage: ClassVar[str] = "it is not supported for Fast-dLLM v2"
    # What these change or report would not hold for the boundary token, which no step decides.
    excludes: ClassVar[frozenset[Beside]] = frozenset(
        {"constraints", "logprobs", "traces", "row_options"}
    )
    fields: ClassVar[Fields] = FIELDS
    mask_spellings: ClassVar[tuple[str, ...]] = ("|<MASK>|",)
    usual_mask_token: ClassVar[int | None] = 151665

    def configure(self, vllm_config: VllmConfig) -> None:
        """See `Family.configure`."""
        super().configure(vllm_config)
        # Qwen2.5's generation config has a penalty, which the authors' `generate` does not apply.
        override = vllm_config.model_config.override_generation_config
        override.setdefault("repetition_penalty", 1.0)
