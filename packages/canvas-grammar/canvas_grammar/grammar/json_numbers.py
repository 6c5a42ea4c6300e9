"""Write the numbers that have all properties that a schema names.

Without any property a number may have an exponent. Otherwise it is written without one, and an
automaton compares its digits with the bounds. The numbers are right for readers who compute exactly
and for those whose numbers are doubles: rounding to a double never reverses an order, so only a
bound that is excluded needs some distance, and one that no double equals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from canvas_grammar.grammar.decimals import (
    COMPLETE,
    DIGITS,
    START,
    Compared,
    Condition,
    Multiple,
    Position,
    Seen,
    Shape,
    Whole,
    bounds,
    divisors,
    few_numbers,
    least_common_multiple,
    surely_within,
)
from canvas_grammar.grammar.json_facts import NumberFacts
from canvas_grammar.grammar.language import (
    NOTHING,
    Node,
    chars,
    either,
    literal,
    optional,
    repeat,
    sequence,
)
from canvas_grammar.grammar.rules import REMEMBERED, finite_automaton, shared
from canvas_grammar.limits import ConstraintError

LARGEST_EXPONENT = 308  # of a double
EXACT = 1 << 53  # up to here, every integer is a double
MOST_STATES = 20_000
DIGIT = chars([(0x30, 0x39)])
NOT_ZERO = chars([(0x31, 0x39)])

# Whether a number has some property, from what its conditions have seen.
Verdict = Callable[[tuple[Seen, ...]], bool]


@lru_cache(REMEMBERED)
def number_language(facts: NumberFacts) -> Node:
    """The numbers with these properties; equal facts give the same node.

    Raises:
        ConstraintError: see `number_tree`.
    """
    return shared("integer" if facts.integer else "number", number_tree(facts))


@lru_cache(REMEMBERED)
def number_tree(facts: NumberFacts) -> Node:
    """The same as `number_language` without a call of a rule, so that it may be part of `Both`.

    Raises:
        ConstraintError: a bound or a divisor is too large or has too many digits.
    """
    if facts == NumberFacts(integer=True):
        digits = sequence(NOT_ZERO, repeat(DIGIT, 0, DIGITS - 1))
        return either([literal("0"), sequence(optional(literal("-")), digits)])
    if facts == NumberFacts():
        return _any_number()
    few = few_numbers(facts) if facts.multiples else None
    if few is not None and facts.excluded:  # several automata at once are large
        return either(map(literal, few))
    try:
        return _number(facts)
    except ValueError as error:
        if few is not None:
            return either(map(literal, few))
        if isinstance(error, ConstraintError):
            raise
        raise ConstraintError(f"a bound or multipleOf is not a decimal number: {error}") from error


def _any_number() -> Node:
    whole = either([literal("0"), sequence(NOT_ZERO, repeat(DIGIT, 0, DIGITS - 1))])
    fraction = optional(sequence(literal("."), repeat(DIGIT, 1, DIGITS)))
    letters = chars([(0x45, 0x45), (0x65, 0x65)])
    sign = optional(chars([(0x2B, 0x2B), (0x2D, 0x2D)]))
    exponent = optional(sequence(letters, sign, repeat(DIGIT, 1, 2)))
    return sequence(optional(literal("-")), whole, fraction, exponent)


def _number(facts: NumberFacts) -> Node:
    for bound in bounds(facts):
        if abs(bound) >= 10**LARGEST_EXPONENT:
            raise ConstraintError(
                f"minimum and maximum go up to 1e{LARGEST_EXPONENT}, beyond which no double follows"
            )
    if any(divisor <= 0 for divisor in divisors(facts)):
        raise ConstraintError("multipleOf is a number above 0")
    facts = _plain(facts)
    if any(surely_within(facts, excluded) for excluded in facts.excluded):
        return NOTHING
    if facts.least is not None and facts.most is not None:
        empty = facts.least > facts.most
        if empty or (facts.least == facts.most and (facts.above or facts.below)):
            return NOTHING
    shape = Shape.from_facts(facts)
    conditions: list[Condition] = []
    verdict = _ConditionBuilder(shape.fraction, conditions).holds(facts)

    def moves(state: _State) -> Iterator[tuple[str, _State]]:
        for char, position in shape.moves(state.position):
            seen = zip(conditions, state.seen, strict=True)
            yield char, _State(position, tuple(one.after(known, char) for one, known in seen))

    def accepts(state: _State) -> bool:
        return state.position[0] in COMPLETE and verdict(state.seen)

    start = _State((START, 0), tuple(one.start for one in conditions))
    try:
        found = finite_automaton(start, moves, accepts, MOST_STATES)
    except ConstraintError as error:
        raise ConstraintError(f"these bounds and multipleOf are too much: {error}") from error
    if found.empty and not shape.complete:
        raise ConstraintError(
            f"no number with up to {shape.whole} digits before the point and {shape.fraction} "
            "after it fits minimum, maximum and multipleOf"
        )
    return found


def _plain(facts: NumberFacts) -> NumberFacts:
    """The facts with one divisor at most; integers are multiples of 1."""
    divisors = (*facts.multiples, *([Fraction(1)] if facts.integer else []))
    multiples = (least_common_multiple(divisors),) if facts.multiples else ()
    return NumberFacts(
        facts.integer, facts.least, facts.above, facts.most, facts.below, multiples, facts.excluded
    )


@dataclass(frozen=True)
class _State:
    position: Position
    seen: tuple[Seen, ...]


class _ConditionBuilder:
    """Turns facts into conditions, and a verdict on what these have seen."""

    def __init__(self, fraction: int, conditions: list[Condition]) -> None:
        self.unit = 10**fraction
        self.conditions = conditions

    def holds(self, facts: NumberFacts) -> Verdict:
        """For every reader, a number has all properties."""
        found = [*self._conditions(facts, wanted=True), *map(self.fails, facts.excluded)]
        return lambda seen: all(one(seen) for one in found)

    def fails(self, facts: NumberFacts) -> Verdict:
        """For every reader, a number lacks some property."""
        found = [*self._conditions(facts, wanted=False), *map(self.holds, facts.excluded)]
        return lambda seen: any(one(seen) for one in found)

    def _conditions(self, facts: NumberFacts, wanted: bool) -> Iterator[Verdict]:
        if facts.integer:
            yield self._verdict(Whole(wanted))
        if facts.least is not None:
            bound = self._beyond if wanted else self._within
            yield self._verdict(Compared(bound(facts.least, facts.above == wanted), wanted))
        if facts.most is not None:
            bound = self._within if wanted else self._beyond
            yield self._verdict(Compared(bound(facts.most, facts.below == wanted), not wanted))
        for divisor in facts.multiples:
            yield self._verdict(Multiple(divisor, wanted))

    def _verdict(self, condition: Condition) -> Verdict:
        if condition not in self.conditions:
            self.conditions.append(condition)
        place = self.conditions.index(condition)
        return lambda seen: condition.holds(seen[place])

    def _beyond(self, bound: Fraction, excluded: bool) -> Fraction:
        """The smallest number with the shape's fraction that no reader takes for a smaller one."""
        double = Fraction(float(bound))
        safe = max(bound, double) if abs(bound) > EXACT else bound
        scaled = safe * self.unit
        found = Fraction(math.floor(scaled) + 1 if excluded else math.ceil(scaled), self.unit)
        if excluded and float(found) <= float(bound):
            above = Fraction(math.nextafter(float(bound), math.inf))
            found = Fraction(math.ceil(above * self.unit), self.unit)
        return found

    def _within(self, bound: Fraction, excluded: bool) -> Fraction:
        """The largest number with the shape's fraction that no reader takes for a larger one."""
        return -self._beyond(-bound, excluded)
