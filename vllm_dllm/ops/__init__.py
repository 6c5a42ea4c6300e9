"""Tensor operators: a plain reference for each, and kernels beside them. Never imports vLLM."""
