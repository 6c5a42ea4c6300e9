"""Paged attention with a mask rule for each request: masks and Triton kernels."""
