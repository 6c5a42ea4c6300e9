"""Structured output: automata over tokens, and the best or a sampled path through a canvas.

Nothing here knows requests or vLLM. `grammar`, `automaton` and `service` import no torch, and this
package itself imports nothing, so that the processes that compile constraints (`service.worker`)
start quickly.
"""
