"""Describe free text, in which something may begin at any time: prose with tool calls in it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from canvas_grammar.grammar.language import (
    ANY,
    EMPTY_TEXT,
    Node,
    chars,
    either,
    literal,
    repeat,
    sequence,
)
from canvas_grammar.grammar.rules import Both, Without
from canvas_grammar.limits import ConstraintError

CHARACTER = chars(ANY)
ANYTHING = repeat(CHARACTER, 0, None)


def free_text(without: Collection[str], most: int | None = None) -> Node:
    """Any text, the empty one included, in which some texts do not occur.

    Args:
        without: the texts.
        most: number of characters that it may have.

    Raises:
        ConstraintError: one of the texts is empty.
    """
    text = ANYTHING
    if without:
        text = Without(ANYTHING, sequence(ANYTHING, _any_of(without), ANYTHING))
    return text if most is None else Both(text, repeat(CHARACTER, 0, most))


def dispatched(bodies: Mapping[str, Node], without: Collection[str], loop: bool) -> Node:
    """Free text, and at the first occurrence of a trigger what must follow it.

    Args:
        bodies: the language after each trigger.
        without: texts that do not occur in the free text.
        loop: whether free text, and further triggers, may follow; otherwise nothing does.

    Raises:
        ConstraintError: a trigger or one of the texts is empty.
    """
    avoided = [*bodies, *without]
    begun = either(
        sequence(_up_to(trigger, bodies, without), body) for trigger, body in bodies.items()
    )
    if loop:
        return sequence(repeat(begun, 0, None), free_text(avoided))
    return either([begun, free_text(avoided)])


def marked(token: Node, text: str, body: Node, without: Collection[str], loop: bool) -> Node:
    """The same as `dispatched`, for a single trigger that is a token which no text spells.

    Args:
        token: the trigger.
        text: the text as which it is put out; the free text does not contain that either.
        body: the language after the trigger.
        without: as for `dispatched`.
        loop: as for `dispatched`.
    """
    prose = free_text([text, *without])
    begun = sequence(prose, token, body)
    return sequence(repeat(begun, 0, None), prose) if loop else either([begun, prose])


def _up_to(trigger: str, triggers: Collection[str], without: Collection[str]) -> Node:
    """Free text up to the end of a trigger, with no trigger before; longer ones come first."""
    longer = [other for other in triggers if other != trigger and other.endswith(trigger)]
    earlier = sequence(ANYTHING, _any_of([*triggers, *without]), CHARACTER, ANYTHING)
    there = sequence(ANYTHING, either(literal(text) for text in [*longer, *without]))
    return Without(sequence(ANYTHING, literal(trigger)), either([earlier, there]))


def _any_of(texts: Collection[str]) -> Node:
    found = [literal(text) for text in texts]
    if EMPTY_TEXT in found or "" in texts:
        raise ConstraintError("structural_tag: free text needs an end or a trigger that is a text")
    return either(found)
