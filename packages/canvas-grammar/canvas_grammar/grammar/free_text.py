"""Describe free text, in which something may begin at any time: prose with tool calls in it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from canvas_grammar.constraint import Thought
from canvas_grammar.grammar.language import ANY, EMPTY_TEXT, Node, chars, either, repeat, sequence
from canvas_grammar.grammar.marks import ANY_MARK, Marks
from canvas_grammar.grammar.rules import Both, Without
from canvas_grammar.limits import ConstraintError

CHARACTER = chars(ANY)
ANYTHING = repeat(CHARACTER, 0, None)
# Free text may hold any token.
FREE = either([CHARACTER, ANY_MARK])
PROSE = repeat(FREE, 0, None)


def free_text(without: Collection[str], marks: Marks, most: int | None = None) -> Node:
    """Any text of up to `most` characters in which some texts do not occur; these are not empty."""
    text = PROSE
    if without:
        text = Without(PROSE, sequence(PROSE, _any_of(without, marks), PROSE))
    return text if most is None else Both(text, repeat(FREE, 0, most))


def dispatched(
    bodies: Mapping[str, Node], without: Collection[str], marks: Marks, loop: bool
) -> Node:
    """Free text in which the first trigger is followed by what it demands.

    Args:
        bodies: the language after each trigger.
        without: texts that do not occur in the free text.
        marks: the vocabulary's tokens for parts of texts.
        loop: whether free text, and further triggers, may follow; otherwise nothing does.
    """
    avoided = [*bodies, *without]
    begun = either(
        sequence(_up_to(trigger, bodies, without, marks), body) for trigger, body in bodies.items()
    )
    if loop:
        return sequence(repeat(begun, 0, None), free_text(avoided, marks))
    return either([begun, free_text(avoided, marks)])


def after_thought(thought: Thought, language: Node, marks: Marks) -> Node:
    """Texts that begin with a thought; its end is a token, also where a client does not see it."""
    marks = marks.visible()
    others = [text for text in thought.without if text != thought.end]
    whole = sequence(_up_to(thought.end, [thought.end], others, marks), language)
    open_thought = free_text([thought.end, *others], marks)
    return either([whole, open_thought]) if thought.may_be_all else whole


def _up_to(trigger: str, triggers: Collection[str], without: Collection[str], marks: Marks) -> Node:
    """Free text up to the end of a trigger, with no trigger before; longer ones come first."""
    longer = [other for other in triggers if other != trigger and other.endswith(trigger)]
    earlier = sequence(PROSE, _any_of([*triggers, *without], marks), FREE, PROSE)
    there = sequence(PROSE, either(map(marks.found, [*longer, *without])))
    return Without(sequence(PROSE, marks.written(trigger)), either([earlier, there]))


def _any_of(texts: Collection[str], marks: Marks) -> Node:
    found = [marks.found(text) for text in texts]
    if EMPTY_TEXT in found or "" in texts:
        raise ConstraintError("structural_tag: free text needs an end or a trigger that is a text")
    return either(found)
