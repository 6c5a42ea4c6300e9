"""LLaDA2.2: LLaDA2 with experts that are chosen for whole blocks, and edits of a canvas' layout."""
