"""SDAR on vLLM's Qwen3 and Qwen3-MoE backbones; its weights have the same names as theirs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM

from vllm_dllm.checkpoints.updates import Weights
from vllm_dllm.checkpoints.verify import KV_SCALES, building, expected, linear_layers, verified
from vllm_dllm.families.block_causal.model import MaskedCanvasModel
from vllm_dllm.families.sdar.hf_config import SDARConfig, SDARMoeConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class _Checked(MaskedCanvasModel):
    """Loads exactly the tensors that a published checkpoint has."""

    config: Any
    quant_config: Any

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_config
        if not isinstance(config, SDARConfig | SDARMoeConfig):
            raise ValueError(
                f"{type(self).__name__} needs a checkpoint with model_type 'sdar' or 'sdar_moe', "
                f"got {getattr(config, 'model_type', type(config).__name__)!r}"
            )
        layers = linear_layers(tensor_shapes(config), is_linear)
        with building(vllm_config.quant_config, layers):
            super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]

    def verified_weights(self, weights: Weights, whole: bool) -> Weights:
        """Name the first wrong tensor; tensors of an unknown quantization are not checked."""
        tensors = expected(tensor_shapes(self.config), self.quant_config, is_linear)
        if tensors is None:
            return weights
        beside = None if self.quant_config is None else KV_SCALES
        return verified(weights, tensors, "SDAR", beside=beside, whole=whole)


class SDARForCausalLM(_Checked, Qwen3ForCausalLM):
    """SDAR's dense models, TraDo and DiRL.

    Raises:
        ValueError: the checkpoint's tensors are not those of this architecture.
    """


class SDARMoeForCausalLM(_Checked, Qwen3MoeForCausalLM):
    """SDAR's models with experts; see `SDARForCausalLM`."""


def is_linear(name: str) -> bool:
    """Whether a tensor belongs to a layer that can be quantized: not the router or head."""
    return name.endswith("_proj.weight")


def tensor_shapes(config: SDARConfig | SDARMoeConfig) -> Mapping[str, tuple[int, ...]]:
    """Every tensor of an unquantized checkpoint."""
    hidden, dim = config.hidden_size, config.head_dim
    query, key_value = config.num_attention_heads * dim, config.num_key_value_heads * dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for index in range(config.num_hidden_layers):
        layer = f"model.layers.{index}"
        attention = f"{layer}.self_attn"
        shapes |= {
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{attention}.q_norm.weight": (dim,),
            f"{attention}.k_norm.weight": (dim,),
            f"{attention}.o_proj.weight": (hidden, query),
        }
        for name, size in (("q", query), ("k", key_value), ("v", key_value)):
            shapes[f"{attention}.{name}_proj.weight"] = (size, hidden)
        if isinstance(config, SDARMoeConfig) and has_experts(config, index):
            shapes[f"{layer}.mlp.gate.weight"] = (config.num_experts, hidden)
            for expert in range(config.num_experts):
                prefix = f"{layer}.mlp.experts.{expert}"
                shapes |= _mlp_shapes(prefix, hidden, config.moe_intermediate_size)
        else:
            shapes |= _mlp_shapes(f"{layer}.mlp", hidden, config.intermediate_size)
    return shapes


def has_experts(config: SDARMoeConfig, index: int) -> bool:
    """Whether a layer has experts, as in Qwen3-MoE."""
    return index not in (config.mlp_only_layers or ()) and (
        config.num_experts > 0 and (index + 1) % config.decoder_sparse_step == 0
    )


def _mlp_shapes(prefix: str, hidden: int, size: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj.weight": (size, hidden),
        f"{prefix}.up_proj.weight": (size, hidden),
        f"{prefix}.down_proj.weight": (hidden, size),
    }
