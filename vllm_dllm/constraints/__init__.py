"""Structured output: automata over tokens, and the best or a sampled path through a canvas.

Nothing here knows about requests or vLLM. `grammar`, `automaton`, `pool` and `compiler` do not
import torch, and this package itself imports nothing, so the processes that compile constraints
start quickly.
"""
