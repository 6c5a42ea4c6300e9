"""Tensor operators, some of them also as Triton kernels. Never imports vLLM."""
