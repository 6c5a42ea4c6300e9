"""Structured output: automata over tokens, and the best or a sampled path through a canvas.

Nothing here knows requests or vLLM. `grammar`, `automaton`, `pool` and `compiler` import no torch,
and this package itself imports nothing, so that the processes that compile constraints start
quickly.
"""
