"""Structured output: constraints are compiled in processes of their own (`pool`, `compiler`).

Nothing here imports torch or vLLM, and this package itself imports nothing, so these processes
start quickly.
"""
