"""Define tokens that mark where something begins and ends, and that no text can spell.

Gemma writes tool calls with special tokens. Each of those has a byte here that UTF-8 does not use,
so no text contains it, and a special token occurs only where a constraint asks for it.
"""

from __future__ import annotations

from collections.abc import Collection

from canvas_grammar.grammar.language import Node, literal
from canvas_grammar.grammar.rules import Automaton

CALL, CALL_END, DELIMITER = "<|tool_call>", "<tool_call|>", '<|"|>'
MARKS = {CALL: 0xF8, CALL_END: 0xF9, DELIMITER: 0xFA}
# Our own field of structural tags: if a schema is not supported, the content may be any object.
LENIENT = "or_any_object"
# Our own format: the arguments of a call in Gemma's notation. A tag that holds it has a field
# next to the format: the tokens that the vocabulary has for its marks, and its special tokens.
GEMMA_ARGUMENTS = "gemma_arguments"
GEMMA_TOKENS = "gemma_tokens"
_NODES = {token: Automaton(({chr(byte): 1}, {}), (False, True)) for token, byte in MARKS.items()}


def mark(token: str, known: Collection[str]) -> Node:
    """One of the tokens of `MARKS`, or its text if the vocabulary has no such token.

    Args:
        token: its text.
        known: the tokens that the vocabulary has.
    """
    return _NODES[token] if token in known else literal(token)
