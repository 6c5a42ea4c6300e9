"""Grammars in either notation that vLLM takes: GBNF or Lark's."""

from __future__ import annotations

import re

from canvas_grammar.grammar.ebnf import ebnf
from canvas_grammar.grammar.language import Node
from canvas_grammar.grammar.lark_grammar import lark_grammar
from canvas_grammar.limits import CompileLimits


def grammar(text: str, limits: CompileLimits) -> Node:
    """The language of a grammar.

    Raises:
        ConstraintError: the grammar is not supported, with the reason.
    """
    return lark_grammar(text, limits) if is_lark(text) else ebnf(text, limits)


def is_lark(text: str) -> bool:
    """Whether a grammar is in Lark's notation rather than in GBNF, by the rule that vLLM has."""
    lines = (re.sub(r"(#|//).*$", "", line) for line in text.split("\n"))
    return not any("::=" in line for line in lines)
