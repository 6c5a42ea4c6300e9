"""Write the numbers that have all properties that a schema names.

Without any property a number may have an exponent. Otherwise it is written without one, and an
automaton compares its digits with the bounds. The numbers are right for readers who compute exactly
and for those whose numbers are doubles: rounding to a double never reverses an order, so only a
bound that is excluded needs some distance, and one that no double equals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from math import ceil, floor, gcd, lcm

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
from canvas_grammar.limits import ConstraintError, spend


@dataclass(frozen=True)
class NumberFacts:
    """What a schema's keywords together say about a number.

    Attributes:
        integer: whether only integers belong to it.
        least: a number is not smaller.
        above: whether it is also not equal to `least`.
        most: a number is not larger.
        below: whether it is also not equal to `most`.
        multiples: a number is a multiple of each of them; they are above 0.
        excluded: a number that has the properties of any of these is left out.
    """

    integer: bool = False
    least: Fraction | None = None
    above: bool = False
    most: Fraction | None = None
    below: bool = False
    multiples: tuple[Fraction, ...] = ()
    excluded: tuple[NumberFacts, ...] = ()

    def fits(self, value: Fraction) -> bool:
        """Whether a number has all properties."""
        low, high = self.least, self.most
        return (
            (not self.integer or value.denominator == 1)
            and (low is None or value > low or (value == low and not self.above))
            and (high is None or value < high or (value == high and not self.below))
            and all((value / step).denominator == 1 for step in self.multiples)
            and not any(other.fits(value) for other in self.excluded)
        )


# ---- Conditions on a number: each is a small automaton that reads one character after the other.
#
# It has a state before the text, one `after` each character, and `holds` or not if the text ends.
# States say nothing about the shape of the text, which is an optional ``-``, digits without a
# leading zero, and perhaps a point and more digits.

# The state of a condition after some characters: a few small integers.
Seen = tuple[int, ...]


@dataclass(frozen=True)
class Compared:
    """The number is at least `bound`, or at most `bound`, which is a decimal number.

    Its state: whether there is a sign, then (phase, place, order): in phase 0, `place` digits
    of the whole part; in phase 1, `place` digits of the fraction, and all is equal so far; in phase
    2, nothing else matters. The order (-1, 0 or 1) is that of the magnitudes.
    """

    bound: Fraction
    at_least: bool
    start: Seen = (0, 0, 0, 0)

    @cached_property
    def digits(self) -> tuple[str, str]:
        """The digits of the bound's magnitude, before and after the point."""
        return decimal_digits(abs(self.bound))

    def after(self, seen: Seen, char: str) -> Seen:
        """Compare one more digit."""
        signed, phase, place, order = seen
        whole, fraction = self.digits
        if char == "-":
            return 1, phase, place, order
        if phase == 2:
            return seen
        if char == ".":
            order = order if place == len(whole) else -1
            return (signed, 2, 0, order) if order else (signed, 1, 0, 0)
        if phase == 0:
            if place == len(whole):
                return signed, 2, 0, 1
            return signed, 0, place + 1, order or _order(char, whole[place])
        order = _order(char, fraction[place] if place < len(fraction) else "0")
        if order:
            return signed, 2, 0, order
        return signed, 1, min(place + 1, len(fraction)), 0

    def holds(self, seen: Seen) -> bool:
        """Compare the whole number."""
        signed, phase, place, order = seen
        whole, fraction = self.digits
        if phase == 0:
            order = -1 if place < len(whole) else order or -bool(fraction)
        elif phase == 1:
            order = -1 if place < len(fraction) else 0
        # -0 equals 0, so its order to 0 is 0.
        if signed:
            order = -order if self.bound <= 0 else -1
        elif self.bound < 0:
            order = 1
        return order >= 0 if self.at_least else order <= 0


@dataclass(frozen=True)
class Multiple:
    """The number is a multiple of a decimal `divisor` above 0 or, if not `wanted`, is not one.

    Its state: digits after the point (-1 before it, and no more than the divisor has), and the
    remainder of all digits; or just (-2,) if the number has more digits after the point.
    """

    divisor: Fraction
    wanted: bool = True
    start: Seen = (-1, 0)

    @cached_property
    def moduli(self) -> tuple[int, ...]:
        """By digits after the point, what all digits together must be a multiple of."""
        places = len(decimal_digits(self.divisor)[1])
        scaled = int(self.divisor * 10**places)
        return tuple(scaled // gcd(scaled, 10 ** (places - n)) for n in range(places + 1))

    @cached_property
    def alike(self) -> list[int]:
        """For each remainder before the point, the smallest one with the same future.

        For 1000, only the number of zeros at the end matters, which gives 4 instead of 1000.
        """
        modulus = self.moduli[0]
        if len(self.moduli) > 1:
            return list(range(modulus))
        smallest: dict[tuple[int, ...], int] = {}
        # By length, the only further digits, if any, that lead to a multiple. From some length on
        # there always are some, and they say what the remainder is but for factors 2 and 5.
        powers = [10**length for length in range(len(str(modulus)) + 1)]
        spend(modulus * len(powers) // 2)
        core = modulus // gcd(modulus, 10 ** modulus.bit_length())
        found = []
        for rest in range(modulus):
            wanted = (-rest * power % modulus for power in powers)
            future = (
                more if more < power else -1 for more, power in zip(wanted, powers, strict=True)
            )
            found.append(smallest.setdefault((rest % core, *future), rest))
        return found

    def after(self, seen: Seen, char: str) -> Seen:
        """The remainder with one more digit."""
        if char == "-" or seen == (-2,):
            return seen
        place, rest = seen
        if char == ".":
            return 0, rest
        if place == -1:
            return -1, self.alike[(10 * rest + int(char)) % self.moduli[0]]
        if place + 1 < len(self.moduli):
            return place + 1, (10 * rest + int(char)) % self.moduli[place + 1]
        return seen if char == "0" else (-2,)

    def holds(self, seen: Seen) -> bool:
        """Whether nothing remains."""
        return (seen != (-2,) and seen[1] == 0) == self.wanted


@dataclass(frozen=True)
class Whole:
    """The number is written as an integer or, if not `wanted`, it is not an integer.

    1.0 is neither, because drafts of JSON Schema disagree on whether it is an integer.
    """

    wanted: bool = True
    start: Seen = (0,)

    def after(self, seen: Seen, char: str) -> Seen:
        """0: no point; 1: a point followed by zeros; 2: a point followed by another digit."""
        if char == ".":
            return (1,)
        return (2,) if seen == (1,) and char not in "-0" else seen

    def holds(self, seen: Seen) -> bool:
        """Whether there is no point, or a digit other than 0 after it."""
        return seen == (0,) if self.wanted else seen == (2,)


Condition = Compared | Multiple | Whole


def decimal_digits(number: Fraction) -> tuple[str, str]:
    """The digits of a decimal number >= 0, before and after the point; "" if it is an integer."""
    places = decimal_places(number)
    whole, part = divmod(int(number * 10**places), 10**places)
    return str(whole), f"{part:0{places}}" if places else ""


def decimal_places(number: Fraction) -> int:
    """Digits after the point; infinitely many are a `ValueError`."""
    twos = (number.denominator & -number.denominator).bit_length() - 1
    fives, rest = 0, number.denominator >> twos
    while rest % 5 == 0:
        fives, rest = fives + 1, rest // 5
    if rest != 1:
        raise ValueError(f"{number} has infinitely many digits")
    return max(twos, fives)


def least_common_multiple(numbers: tuple[Fraction, ...]) -> Fraction:
    """The smallest number above 0 that is a multiple of all of some numbers above 0."""
    return Fraction(lcm(*(n.numerator for n in numbers)), gcd(*(n.denominator for n in numbers)))


def _order(left: str, right: str) -> int:
    return (left > right) - (left < right)


# ---- How decimal numbers with bounds or divisors are written: how many digits they may have.

DIGITS = 15  # that a double can distinguish
FRACTION = 6  # digits after the point, if the bounds have fewer
MOST_FRACTION = 12
MOST_WHOLE = 40  # digits before the point up to which everything between two bounds is offered
MOST_REMAINDERS = 1_000
LARGEST_MODULUS = 100_000  # whose remainders are examined
MOST_COUNTED_REMAINDERS = 4_000  # remainders times digits

START, _SIGN, _ZERO, _WHOLE, _POINT, _FRACTION = range(6)
COMPLETE = (_ZERO, _WHOLE, _FRACTION)
Position = tuple[int, int]  # where in the text, and how many digits of the whole part or fraction


@dataclass(frozen=True)
class Shape:
    """How many digits a number has."""

    whole: int  # before the point, at most
    fraction: int  # after the point, at most; 0 for integers, which have no point
    complete: bool  # whether all numbers that the facts allow have this shape

    @classmethod
    def from_facts(cls, facts: NumberFacts) -> Shape:
        """The shape of the numbers with some properties.

        Divisors with too many digits, or too small for the bounds, are refused.
        """
        nearest = max(facts.least or 0, -(facts.most or 0), 0)
        needed = len(str(int(nearest) + 1))
        whole, bounded = max(DIGITS, needed), False
        if facts.least is not None and facts.most is not None:
            farthest = len(str(int(max(abs(facts.least), abs(facts.most)))))
            bounded = farthest <= max(whole, MOST_WHOLE)
            whole = farthest if bounded else whole
        places = max((decimal_places(bound) for bound in bounds(facts)), default=0)
        fraction = 0 if facts.integer else min(MOST_FRACTION, max(FRACTION, places + 1))
        exact = facts.integer or facts.least == facts.most
        steps = list(divisors(facts))
        if steps:
            deepest = max(map(decimal_places, steps))
            if deepest > MOST_FRACTION:
                raise ConstraintError(f"multipleOf has at most {MOST_FRACTION} decimals")
            if facts.multiples:
                exact = True
                fraction = 0 if facts.integer else max(1, decimal_places(facts.multiples[0]))
            digits = min(DIGITS - deepest, _countable(steps))
            if needed > digits:
                raise ConstraintError(f"multipleOf goes with numbers of up to {digits} digits here")
            bounded, whole = bounded and whole <= digits, min(whole, digits)
        return cls(whole, fraction, bounded and exact)

    def moves(self, position: Position) -> Iterator[tuple[str, Position]]:
        """The next characters, and the positions after them."""
        where, count = position
        if where == START:
            yield "-", (_SIGN, 0)
        if where in (START, _SIGN):
            if where == START or self.fraction:  # an integer is not written -0
                yield "0", (_ZERO, 1)
            yield from ((digit, (_WHOLE, 1)) for digit in "123456789")
        if where == _WHOLE and count < self.whole:
            yield from ((digit, (_WHOLE, count + 1)) for digit in "0123456789")
        if where in (_ZERO, _WHOLE) and self.fraction and count + self.fraction <= DIGITS:
            yield ".", (_POINT, 0)
        if where in (_POINT, _FRACTION) and count < self.fraction:
            yield from ((digit, (_FRACTION, count + 1)) for digit in "0123456789")


def _countable(steps: Iterable[Fraction]) -> int:
    """How many digits the automata of some divisors can count."""
    digits = DIGITS
    for divisor in steps:
        multiple = Multiple(divisor)
        modulus = multiple.moduli[0]
        remainders = modulus if modulus > LARGEST_MODULUS else len(set(multiple.alike))
        if remainders > MOST_REMAINDERS:
            raise ConstraintError(
                f"multipleOf {divisor} takes {remainders} remainders; at most {MOST_REMAINDERS} "
                "are served"
            )
        enough = len(str(int(divisor))) + 1
        digits = min(digits, max(enough, MOST_COUNTED_REMAINDERS // remainders))
    return digits


def bounds(facts: NumberFacts) -> Iterator[Fraction]:
    """All bounds, including those of what is excluded."""
    yield from (bound for bound in (facts.least, facts.most) if bound is not None)
    for excluded in facts.excluded:
        yield from bounds(excluded)


def divisors(facts: NumberFacts) -> Iterator[Fraction]:
    """All divisors, including those of what is excluded."""
    yield from facts.multiples
    for excluded in facts.excluded:
        yield from divisors(excluded)


MOST_LISTED = 2_000


def few_numbers(facts: NumberFacts) -> list[str] | None:
    """The texts of all numbers with some properties, in their order.

    None if these name no divisor or not both bounds, or if more than `MOST_LISTED` multiples lie
    between the bounds.
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
    """Whether numbers with some properties clearly have others, too."""
    if other.excluded or (other.integer and not facts.integer):
        return False
    step = _step(facts)
    if any(step is None or (step / divisor).denominator != 1 for divisor in other.multiples):
        return False
    low, high = other.least, other.most
    return (
        low is None
        or (facts.least is not None and (facts.least, facts.above) >= (low, other.above))
    ) and (
        high is None
        or (facts.most is not None and (-facts.most, facts.below) >= (-high, other.below))
    )


def _step(facts: NumberFacts) -> Fraction | None:
    """A number that divides all numbers with the properties."""
    steps = (*facts.multiples, *([Fraction(1)] if facts.integer else []))
    if not steps or any(step <= 0 for step in steps):
        return None
    return least_common_multiple(steps)


def _text(value: Fraction) -> str | None:
    """A number as it is written, or None if it has more digits than a double can distinguish."""
    whole, fraction = decimal_digits(abs(value))
    if len(fraction) > MOST_FRACTION or len(whole) + len(fraction) > DIGITS:
        return None
    return f"{'-' if value < 0 else ''}{whole}{'.' if fraction else ''}{fraction}"


# ---- The languages of numbers.

LARGEST_EXPONENT = 308  # of a double
LARGEST_EXACT = 1 << 53  # up to here, every integer is a double
MOST_STATES = 20_000
DIGIT = chars([(0x30, 0x39)])
NOT_ZERO = chars([(0x31, 0x39)])

# Whether a number has some property, from what its conditions have seen.
Verdict = Callable[[tuple[Seen, ...]], bool]


@lru_cache(REMEMBERED)
def number_language(facts: NumberFacts) -> Node:
    """The numbers with these properties; equal facts give the same node."""
    return shared("integer" if facts.integer else "number", number_tree(facts))


@lru_cache(REMEMBERED)
def number_tree(facts: NumberFacts) -> Node:
    """The same as `number_language` without a call of a rule, so that it may be part of `Both`.

    Bounds and divisors that are too large or have too many digits are refused.
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
        open_end = facts.above or facts.below
        if facts.least > facts.most or (facts.least == facts.most and open_end):
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
    step = _step(facts)
    return replace(facts, multiples=(step,) if step and facts.multiples else ())


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
        safe = max(bound, double) if abs(bound) > LARGEST_EXACT else bound
        scaled = safe * self.unit
        found = Fraction(math.floor(scaled) + 1 if excluded else math.ceil(scaled), self.unit)
        if excluded and float(found) <= float(bound):
            above = Fraction(math.nextafter(float(bound), math.inf))
            found = Fraction(math.ceil(above * self.unit), self.unit)
        return found

    def _within(self, bound: Fraction, excluded: bool) -> Fraction:
        """The largest number with the shape's fraction that no reader takes for a larger one."""
        return -self._beyond(-bound, excluded)
