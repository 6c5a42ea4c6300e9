"""A small ordinary causal model, for comparisons with vLLM as it is without this package."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def write_tiny_llama(path: Path, vocabulary: int, positions: int, **config: Any) -> None:
    """Write a Llama with random weights of seed 0; the caller adds a tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        **config,
    )
    LlamaForCausalLM(shape).save_pretrained(path)
