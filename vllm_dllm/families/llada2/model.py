"""LLaDA2 on vLLM's BailingMoeV2 backbone, which is the same network."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.bailing_moe import BailingMoE, BailingMoeV2ForCausalLM

from vllm_dllm.families.block_causal.model import MaskedCanvasModel


class LLaDA2Moe(BailingMoE):
    """The backbone's experts, routed by float32 scores as in the authors' code.

    vLLM rounds the router's float32 logits to the model's dtype before it chooses experts; in
    bfloat16 that selects different experts wherever two scores are close.
    """

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Map hidden states ``[tokens, hidden]`` to the same shape."""
        router_logits, _ = self.gate(hidden_states)  # [tokens, experts], float32
        return self.experts(hidden_states=hidden_states, router_logits=router_logits)


class LLaDA2MoeModelLM(MaskedCanvasModel, BailingMoeV2ForCausalLM):
    """LLaDA2.0 and 2.1, mini and flash."""

    released_as: ClassVar[str] = "LLaDA2"

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        for module in self.modules():
            if type(module) is BailingMoE:
                # The backbone hard-codes its expert class. This one has the same parameters and
                # another forward pass.
                module.__class__ = LLaDA2Moe

    @staticmethod
    def is_linear(name: str) -> bool:
        """See `VerifiedWeights.is_linear`: not the router or head."""
        return name.endswith(("_proj.weight", ".query_key_value.weight", ".dense.weight"))

    @classmethod
    def tensor_shapes(cls, config: Any) -> dict[str, tuple[int, ...]]:
        """Every tensor of an unquantized checkpoint, by the authors' names."""
        hidden, dim = config.hidden_size, config.head_dim
        query = config.num_attention_heads * dim
        key_value = config.num_key_value_heads * dim
        shapes: dict[str, tuple[int, ...]] = {
            "model.word_embeddings.weight": (config.vocab_size, hidden),
            "model.norm.weight": (hidden,),
        }
        if not config.tie_word_embeddings:
            shapes["lm_head.weight"] = (config.vocab_size, hidden)
        bias = config.use_bias
        for index in range(config.num_hidden_layers):
            layer = f"model.layers.{index}"
            shapes |= {
                f"{layer}.input_layernorm.weight": (hidden,),
                f"{layer}.post_attention_layernorm.weight": (hidden,),
                f"{layer}.attention.query_key_value.weight": (query + 2 * key_value, hidden),
                f"{layer}.attention.dense.weight": (hidden, query),
            }
            if bias or config.use_qkv_bias:
                shapes[f"{layer}.attention.query_key_value.bias"] = (query + 2 * key_value,)
            if bias:
                shapes[f"{layer}.attention.dense.bias"] = (hidden,)
            if config.use_qk_norm:
                shapes[f"{layer}.attention.query_layernorm.weight"] = (dim,)
                shapes[f"{layer}.attention.key_layernorm.weight"] = (dim,)
            if index < config.first_k_dense_replace:
                shapes |= _mlp_shapes(f"{layer}.mlp", hidden, config.intermediate_size, bias)
            else:
                shapes |= _expert_shapes(f"{layer}.mlp", config)
        return shapes


def _expert_shapes(prefix: str, config: Any) -> dict[str, tuple[int, ...]]:
    hidden, size = config.hidden_size, config.moe_intermediate_size
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}.gate.weight": (config.num_experts, hidden)}
    if config.moe_router_enable_expert_bias:
        shapes[f"{prefix}.gate.expert_bias"] = (config.num_experts,)
    for expert in range(config.num_experts):
        shapes |= _mlp_shapes(f"{prefix}.experts.{expert}", hidden, size)
    if config.num_shared_experts:
        shared = config.moe_shared_expert_intermediate_size * config.num_shared_experts
        shapes |= _mlp_shapes(f"{prefix}.shared_experts", hidden, shared, config.use_bias)
    return shapes


def _mlp_shapes(
    prefix: str, hidden: int, size: int, bias: bool = False
) -> dict[str, tuple[int, ...]]:
    parts = {"gate_proj": (size, hidden), "up_proj": (size, hidden), "down_proj": (hidden, size)}
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}.{n}.weight": parts[n] for n in parts}
    if bias:
        shapes |= {f"{prefix}.{name}.bias": shape[:1] for name, shape in parts.items()}
    return shapes
