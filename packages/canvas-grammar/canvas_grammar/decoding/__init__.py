"""Decoding under an automaton: the best path through a canvas, or a sampled one."""
