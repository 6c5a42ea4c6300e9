"""Fast-dLLM v2: Qwen2, with a block-causal mask, whose positions are read at the row before."""
