"""Paged attention with a mask rule for each request: mask rules and Triton kernels."""
