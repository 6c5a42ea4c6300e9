"""The white space of JSON, and how its brackets, names and messages are written."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from canvas_grammar.grammar.json.constants import json_text
from canvas_grammar.grammar.language import (
    EMPTY_TEXT,
    Node,
    either,
    literal,
    optional,
    sequence,
)
from canvas_grammar.grammar.rules import Behind


@dataclass(frozen=True)
class JsonLayout:
    """The white space of JSON.

    Attributes:
        gap: white space after an opening bracket, a colon and a comma, and before a closing
            bracket.
    """

    gap: Node = field(default_factory=lambda: optional(literal(" ")))

    def item(self, value: Node) -> Node:
        """A comma, white space and a value."""
        return sequence(literal(","), self.gap, value)

    def pair(self, name: Node, value: Node) -> Node:
        """A comma, white space, a name, a colon and a value."""
        return sequence(literal(","), self.gap, name, literal(":"), self.gap, value)

    def name(self, text: str) -> Node:
        """A name that a condition names; `NOTHING` if it cannot be written."""
        return literal(json_text(text))

    def bracketed(self, brackets: str, inside: Node, empty: bool) -> Node:
        """Brackets around items, of which each has a comma in front.

        Args:
            brackets: the opening and the closing one.
            inside: items; the first comma is taken away. Its text may be empty, which counts only
                with `empty`.
            empty: whether there may be no item.
        """
        options = [literal(brackets)] if empty else []
        if not inside.empty and inside is not EMPTY_TEXT:
            options.append(
                sequence(literal(brackets[0]), Behind(",", inside), self.gap, literal(brackets[1]))
            )
        return either(options)


def names_a_place(text: str) -> bool:
    """Whether a message, or the name of a rule, begins with a place in a schema."""
    return text.startswith(("$", "#", "http"))


def short(value: Any) -> str:
    """A value for messages, shortened because hostile schemas have long names."""
    text = value if isinstance(value, str) else repr(value)[:200]
    return text if len(text) <= 80 else f"{text[:77]}..."
