"""Check conditions on a decimal number by reading its text one character after the other.

A condition is a small separate automaton. Its states say nothing about the shape of the text, which
is an optional ``-``, digits without a leading zero, and perhaps a point and more digits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import ceil, floor, gcd, lcm
from typing import Protocol

from canvas_grammar.grammar.json_facts import NumberFacts
from canvas_grammar.limits import ConstraintError, spend

# The state of a condition after some characters: a few small integers.
Seen = tuple[int, ...]


class Condition(Protocol):
    """A condition on a number."""

    @property
    def start(self) -> Seen:
        """The state before the first character."""

    def after(self, seen: Seen, char: str) -> Seen:
        """The state after one more character."""

    def holds(self, seen: Seen) -> bool:
        """Whether the condition holds if the text ends here."""


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


def decimal_digits(number: Fraction) -> tuple[str, str]:
    """The digits of a decimal number >= 0, before and after the point; "" if it is an integer.

    Raises:
        ValueError: it has infinitely many digits.
    """
    places = decimal_places(number)
    whole, part = divmod(int(number * 10**places), 10**places)
    return str(whole), f"{part:0{places}}" if places else ""


def decimal_places(number: Fraction) -> int:
    """Digits after the point.

    Raises:
        ValueError: there are infinitely many.
    """
    twos = (number.denominator & -number.denominator).bit_length() - 1
    fives, rest = 0, number.denominator >> twos
    while rest % 5 == 0:
        fives, rest = fives + 1, rest // 5
    if rest != 1:
        raise ValueError(f"{number} has infinitely many digits")
    return max(twos, fives)


def least_common_multiple(numbers: tuple[Fraction, ...]) -> Fraction:
    """The smallest number above 0 that is a multiple of all of some numbers above 0."""
    return Fraction(
        lcm(*(number.numerator for number in numbers)),
        gcd(*(number.denominator for number in numbers)),
    )


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
    """How many digits a number has.

    Attributes:
        whole: before the point, at most.
        fraction: after the point, at most; 0 for integers, which have no point.
        complete: whether all numbers that the facts allow have this shape.
    """

    whole: int
    fraction: int
    complete: bool

    @classmethod
    def from_facts(cls, facts: NumberFacts) -> Shape:
        """The shape of the numbers with some properties.

        Raises:
            ConstraintError: a divisor has too many digits, or is too small for the bounds.
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


# ---- Sets of numbers that are plainly empty, or so small that they can be listed.

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
    """Whether numbers with some properties clearly have others, too."""
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
    """A number that divides all numbers with the properties."""
    steps = (*facts.multiples, *([Fraction(1)] if facts.integer else []))
    if not steps or any(step <= 0 for step in steps):
        return None
    return least_common_multiple(steps)


def _text(value: Fraction) -> str | None:
    """A number as it is written, or None if it has more digits than a double can distinguish."""
    if value.denominator != 1 and decimal_places(value) > MOST_FRACTION:
        return None
    whole, fraction = decimal_digits(abs(value))
    if len(whole) + len(fraction) > DIGITS:
        return None
    return f"{'-' if value < 0 else ''}{whole}{'.' if fraction else ''}{fraction}"
