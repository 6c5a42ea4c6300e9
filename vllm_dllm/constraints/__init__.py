"""Structured output: automata over tokens, and the best or a drawn path through a canvas.

Nothing here knows requests or vLLM. Importing this package imports neither torch nor numpy, so that
the process that compiles constraints (`child`) starts quickly.
"""
