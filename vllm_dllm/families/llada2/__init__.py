"""LLaDA2: masked canvases, aligned to absolute multiples of L, under a block-causal mask."""
