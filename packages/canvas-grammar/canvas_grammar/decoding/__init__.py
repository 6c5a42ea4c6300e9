"""Decode under an automaton: find the best path through a canvas, or sample one."""
