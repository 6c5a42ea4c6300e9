"""Do work before a process's first constraint that its forks then share."""

from __future__ import annotations

from canvas_grammar.grammar.ebnf import load_notation
from canvas_grammar.grammar.regex import load_unicode_tables


def preload() -> None:
    """Compute the tables of Unicode and the parser of grammars; takes half a second of CPU time."""
    load_unicode_tables()
    load_notation()
