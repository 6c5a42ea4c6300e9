"""Masked models under a block-causal mask: what LLaDA2 and families like it have in common."""
