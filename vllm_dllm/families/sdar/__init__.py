"""SDAR, and TraDo and DiRL, which were trained from it: Qwen3 with a block-causal mask."""
