"""Large languages that occur often become rules, which are compiled once."""

from __future__ import annotations

from canvas_grammar.grammar.language import Node
from canvas_grammar.grammar.rules import Call, Rule

# Languages of up to this many byte positions are cheaper where they are used than as a rule.
MOST_INLINE_POSITIONS = 40
REMEMBERED = 4096  # languages


def shared(name: str, language: Node) -> Node:
    """A call of a rule of this name, or the language itself if it is small."""
    if language.positions <= MOST_INLINE_POSITIONS:
        return language
    return Call(Rule(name, language))
