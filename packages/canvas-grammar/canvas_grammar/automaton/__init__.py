"""From a regular language over characters to an automaton over the tokens of a vocabulary."""
