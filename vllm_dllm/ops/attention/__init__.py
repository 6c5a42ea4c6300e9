"""Paged attention with a mask rule for each request: reference, masks, Triton kernel."""
