"""The texts of one terminal of a Lark grammar.

Lark matches a terminal with Python's `re` at a place of the text, and takes the one match that `re`
finds there.
"""

from __future__ import annotations

from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from lark.lexer import Pattern, PatternStr

from canvas_grammar.grammar.language import ANY, Node, chars, literal, repeat, sequence
from canvas_grammar.grammar.regex import inner_regex
from canvas_grammar.grammar.rules import Without
from canvas_grammar.limits import ConstraintError

# Terminals of Lark's own library that look behind, and expressions of the same matches.
EQUIVALENT = {
    r'".*?(?<!\\)(\\\\)*?"': r'"(?:[^"\\\n]|\\.)*"',  # common.ESCAPED_STRING
}


def terminal_language(name: str, pattern: Pattern) -> Node:
    """The texts that `re` finds as a match of a terminal's pattern.

    Of a pattern with a repetition such as ``.*?``, which ends as soon as it can, these are the
    matches that do not begin with another match.

    Raises:
        ConstraintError: names the terminal.
    """
    if isinstance(pattern, PatternStr) and not pattern.flags:
        return literal(pattern.value)
    text = pattern.to_regexp()
    text = EQUIVALENT.get(text, text)
    try:
        language = inner_regex(text)
    except ConstraintError as error:
        raise ConstraintError(f"grammar: terminal {name}: {error}") from error
    if not _ends_early(parser.parse(text)):
        return language
    character = chars(ANY)
    return Without(language, sequence(language, character, repeat(character, 0, None)))


def _ends_early(tree: Any) -> bool:
    """Whether a parsed expression holds a repetition that matches as little as it can."""
    if isinstance(tree, parser.SubPattern | list | tuple):
        return any(_ends_early(part) for part in tree)
    return str(tree) == "MIN_REPEAT"
