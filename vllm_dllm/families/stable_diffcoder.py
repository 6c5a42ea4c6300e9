"""Stable-DiffCoder: Llama with a block-causal mask and blocks of 4.

Its checkpoints have ``model_type: llama``, so ``architectures`` alone tells them from Llama.

Source: ``modeling_stable_diffcoder.py`` and ``config.json`` of
ByteDance-Seed/Stable-DiffCoder-8B-Instruct.
"""

from typing import ClassVar

from transformers import LlamaConfig

from vllm_dllm.families.block_causal.family import BlockCausalFamily
from vllm_dllm.families.config_fields import Fields
from vllm_dllm.settings.server import LENGTHS

FIELDS = Fields(
    LlamaConfig,
    frozenset({"mask_token_id", "rope_theta", "rope_scaling", *LENGTHS}),
    # What vLLM's Llama does and the authors' code does not, or in a way that does not fit a canvas.
    {
        "is_causal": ((None, True), "attention without a cache"),
        "bias": ((None, False), "a bias in the projections, by another name"),
        "qkv_bias": ((None, False), "a bias in the projections, by another name"),
        "layer_types": ((None,), "layers of several types"),
        "logit_scale": ((None, 1.0), "scaled logits"),
        "hidden_act": (("silu",), "another activation than SiLU"),
    },
)


class StableDiffCoder(BlockCausalFamily):
    """Stable-DiffCoder-8B, Base and Instruct."""

    architecture: ClassVar[str] = "StableDiffcoderForCausalLM"
    algorithm: ClassVar[str] = "ConfidenceThreshold-DiffCoder"
    fields: ClassVar[Fields] = FIELDS
    block_length: ClassVar[int] = 4
    mask_spellings: ClassVar[tuple[str, ...]] = ("<[MASK_TOKEN]>",)
    usual_mask_token: ClassVar[int] = 5
