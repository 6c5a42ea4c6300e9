"""The geometry of a checkpoint for `benchmarks.model_memory`, read from its configuration.

The vision tower is not counted: a test's server has no images to serve, and loads none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformers import DiffusionGemmaConfig

from benchmarks.published import Attention, Geometry
from vllm_dllm.families.llada2.family import LLaDA2MoeConfig
from vllm_dllm.families.sdar import SDARConfig, SDARMoeConfig


def geometry(config: Mapping[str, Any]) -> Geometry:
    """The geometry of a model, from its ``config.json``."""
    kind = config["model_type"]
    if kind == "llada2_moe":
        return _llada2(LLaDA2MoeConfig(**config))
    if kind == "diffusion_gemma":
        return _gemma(DiffusionGemmaConfig(**config))
    moe = kind == "sdar_moe"
    return _sdar((SDARMoeConfig if moe else SDARConfig)(**config), moe)


def _llada2(config: Any) -> Geometry:
    layers, dense = config.num_hidden_layers, config.first_k_dense_replace
    heads = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    rotary = config.rotary_dim or int(config.head_dim * config.partial_rotary_factor)
    return Geometry(
        config.canvas_length,
        config.hidden_size,
        config.vocab_size,
        (Attention(layers, *heads, rotary=rotary),),
        {config.intermediate_size: dense, config.moe_intermediate_size: layers - dense},
        config.num_experts,
        config.num_experts_per_tok,
        config.moe_intermediate_size,
        layers - dense,
        positions=config.max_position_embeddings,
        float32_router=config.router_dtype == "fp32",
        expert_numbers=1,
    )


def _sdar(config: Any, moe: bool) -> Geometry:
    layers = config.num_hidden_layers
    heads = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    model = Geometry(
        config.canvas_length,
        config.hidden_size,
        config.vocab_size,
        (Attention(layers, *heads),),
        {} if moe else {config.intermediate_size: layers},
        positions=config.max_position_embeddings,
        algorithm="LowConfidenceDynamic",
    )
    if not moe:
        return model
    experts, chosen = config.num_experts, config.num_experts_per_tok
    width = config.moe_intermediate_size
    return replace(model, experts=experts, chosen=chosen, width=width, moe_layers=layers)


def _gemma(config: Any) -> Geometry:
    text = config.text_config
    kinds = []
    for kind in ("sliding_attention", "full_attention"):
        indexes = [n for n, one in enumerate(text.layer_types) if one == kind]
        layer = text.per_layer_config[indexes[0]]
        heads = text.num_attention_heads, layer.num_key_value_heads, layer.head_dim
        sliding = kind == "sliding_attention"
        window, values = (text.sliding_window, 2) if sliding else (None, 1)
        kinds.append(Attention(len(indexes), *heads, window=window, values=values))
    return Geometry(
        config.canvas_length,
        text.hidden_size,
        text.vocab_size,
        tuple(kinds),
        {text.intermediate_size: text.num_hidden_layers + 1},
        text.num_experts,
        text.top_k_experts,
        text.moe_intermediate_size,
        text.num_hidden_layers,
        tied=True,
        positions=text.max_position_embeddings,
        norms=8,
        expert_numbers=1,
        conditioning=text.intermediate_size,
        algorithm="EntropyBound",
    )
