"""Turn a language over characters into an automaton over the tokens of a vocabulary."""
