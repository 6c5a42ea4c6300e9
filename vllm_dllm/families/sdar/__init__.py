"""SDAR, and TraDo and DiRL, which were trained from it: Qwen3 under a block-causal mask."""
