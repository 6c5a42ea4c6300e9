"""Checks of what JSON schemas become: corpora, independent validators, walks through automata."""
