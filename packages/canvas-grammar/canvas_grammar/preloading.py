"""What a process can do before its first constraint, and forks of it then share."""

from __future__ import annotations

from canvas_grammar.grammar.ebnf import load_notation
from canvas_grammar.grammar.regex import load_unicode_tables


def preload() -> None:
    """Compute the tables of Unicode and the parser of grammars, for half a second of CPU time."""
    load_unicode_tables()
    load_notation()
