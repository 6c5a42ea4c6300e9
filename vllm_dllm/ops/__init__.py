"""Tensor operators: each has a plain reference, and some have kernels. Never imports vLLM."""
