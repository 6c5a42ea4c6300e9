"""The best path, or a drawn one, through a canvas that an automaton constrains."""
