"""Grammars are read in the notation that vLLM would take them for."""

from __future__ import annotations

import pytest
from canvas_grammar.grammar.grammars import is_lark
from canvas_grammar_support.grammars import GBNF, LARK
from vllm.v1.structured_output.utils import grammar_is_likely_lark


@pytest.mark.parametrize(
    "text", [*LARK.values(), *GBNF.values(), "start: X // a ::= b", 'root ::= "# ::="', "#", "a"]
)
def test_the_notation_is_told_as_vllm_does(text: str) -> None:
    assert is_lark(text) == grammar_is_likely_lark(text)
