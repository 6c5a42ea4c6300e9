"""From a regular language to an automaton over the tokens of a vocabulary."""
