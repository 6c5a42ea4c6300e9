"""Stable-DiffCoder: Llama with a block-causal mask."""
