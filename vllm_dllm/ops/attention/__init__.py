"""Paged attention with a mask rule for each request: masks, Triton kernels, and a reference."""
