"""Masked models with a block-causal mask: what LLaDA2 and similar families have in common."""
