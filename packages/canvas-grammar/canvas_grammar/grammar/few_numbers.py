"""Sets of numbers that are plainly empty, or so small that they can be listed."""

from __future__ import annotations

from fractions import Fraction
from math import ceil, floor

from canvas_grammar.grammar.decimal_conditions import (
    decimal_digits,
    decimal_places,
    least_common_multiple,
)
from canvas_grammar.grammar.decimal_shape import DIGITS, MOST_FRACTION
from canvas_grammar.grammar.json_facts import NumberFacts

MOST_LISTED = 2_000


def few_numbers(facts: NumberFacts) -> list[str] | None:
    """The texts of all numbers with some properties, in their order.

    Returns:
        None if the properties name no divisor or not both bounds, or if more than `MOST_LISTED`
        multiples lie between these.
    """
    step = _step(facts)
    if step is None or facts.least is None or facts.most is None:
        return None
    first, last = ceil(facts.least / step), floor(facts.most / step)
    if last - first >= MOST_LISTED:
        return None
    found = (step * n for n in range(first, last + 1))
    return [text for value in found if facts.fits(value) and (text := _text(value)) is not None]


def surely_within(facts: NumberFacts, other: NumberFacts) -> bool:
    """Whether it is plain that numbers with some properties have others, too."""
    if other.excluded or (other.integer and not facts.integer):
        return False
    step = _step(facts)
    if any(step is None or (step / divisor).denominator != 1 for divisor in other.multiples):
        return False
    if other.least is not None:
        if facts.least is None or facts.least < other.least:
            return False
        if facts.least == other.least and other.above and not facts.above:
            return False
    if other.most is not None:
        if facts.most is None or facts.most > other.most:
            return False
        if facts.most == other.most and other.below and not facts.below:
            return False
    return True


def _step(facts: NumberFacts) -> Fraction | None:
    """A number of which all that have the properties are multiples."""
    steps = (*facts.multiples, *([Fraction(1)] if facts.integer else []))
    if not steps or any(step <= 0 for step in steps):
        return None
    return least_common_multiple(steps)


def _text(value: Fraction) -> str | None:
    """A number as it is written, or None if it has more digits than a double keeps apart."""
    if value.denominator != 1 and decimal_places(value) > MOST_FRACTION:
        return None
    whole, fraction = decimal_digits(abs(value))
    if len(whole) + len(fraction) > DIGITS:
        return None
    return f"{'-' if value < 0 else ''}{whole}{'.' if fraction else ''}{fraction}"
