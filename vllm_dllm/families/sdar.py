"""SDAR, and TraDo and DiRL, which were trained from it: Qwen3, dense or with experts.

It has a block-causal mask and small blocks.
"""

import re
from dataclasses import replace
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import Qwen3Config, Qwen3MoeConfig
from vllm.config import VllmConfig

from vllm_dllm.families.block_causal.family import BlockCausalFamily
from vllm_dllm.families.config_fields import Fields, MaskedFields, stated_fields


@strict
class SDARConfig(MaskedFields, Qwen3Config):
    """``model_type: sdar``."""

    model_type = "sdar"
    usual_length: ClassVar[int | None] = 4


@strict
class SDARMoeConfig(MaskedFields, Qwen3MoeConfig):
    """``model_type: sdar_moe``."""

    model_type = "sdar_moe"
    usual_length: ClassVar[int | None] = 4
    # Qwen3-MoE's class reads it without declaring it.
    head_dim: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        super().__post_init__(**kwargs)


FIELDS = Fields(
    SDARConfig,
    # Fields that only training uses, one for a window that is never applied, and what vLLM reads.
    frozenset(
        {"fuse_cross_entropy", "debug", "ep_size", "micro_forward", "use_deepep", "skip_checkpoint"}
        | {"max_window_layers", "rope_theta", "rope_scaling"}
    ),
    # What vLLM's Qwen3 would ignore, or do in a way that does not fit a canvas. I-DLM's checkpoints
    # have SDAR's ``model_type`` and are recognised by such a field.
    {
        "use_regular_causal": ((None, False), "tokens that are read causally (I-DLM)"),
        "block_causal_prompt": ((None, True), "prompts that are read causally"),
        "is_causal": ((None, True), "attention without a cache"),
        "attention_bias": ((None, False), "a bias in each of the attention's projections"),
        "hidden_act": (("silu",), "another activation than SiLU"),
        "shared_expert_intermediate_size": ((None, 0), "a shared expert"),
        "dual_chunk_attention_config": ((None,), "attention by chunks of the context"),
    },
)


class SDAR(BlockCausalFamily):
    """SDAR's dense models, TraDo and DiRL."""

    architecture: ClassVar[str] = "SDARForCausalLM"
    algorithm: ClassVar[str] = "LowConfidenceDynamic"
    several_blocks: ClassVar[bool] = True
    fields: ClassVar[Fields] = FIELDS
    mask_spellings: ClassVar[tuple[str, ...]] = ("<|MASK|>", "<MASK>")
    samples: ClassVar[bool] = True

    def configure(self, vllm_config: VllmConfig) -> None:
        """See `Family.configure`."""
        model = vllm_config.model_config
        named = length_of_name(model.model)
        if named is not None and not {"block_size", "canvas_length"} & stated_fields(model).keys():
            model.hf_config.canvas_length = named
        super().configure(vllm_config)


class SDARMoe(SDAR):
    """SDAR's models with experts."""

    architecture: ClassVar[str] = "SDARMoeForCausalLM"
    fields: ClassVar[Fields] = replace(FIELDS, config_class=SDARMoeConfig)


def length_of_name(model: str) -> int | None:
    """L from the name of a published checkpoint, such as ``SDAR-4B-Chat-b16``, or None."""
    found = re.findall(r"-b(4|8|16|32|64)(?=[-/]|$)", model)
    return int(found[-1]) if found else None
