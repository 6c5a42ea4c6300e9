"""LLaDA2: masked canvases, aligned to absolute multiples of L, with a block-causal mask."""
