"""Conditions on a decimal number, read from its text one character after the other.

A condition is a small automaton of its own. Its states say nothing about the shape of the text,
which is an optional ``-``, digits without a leading zero, and perhaps a point and more digits.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import gcd, lcm
from typing import Protocol

# What a condition knows after some characters: a few small integers.
Seen = tuple[int, ...]


class Condition(Protocol):
    """A condition on a number."""

    @property
    def start(self) -> Seen:
        """What is known before the first character."""

    def after(self, seen: Seen, char: str) -> Seen:
        """What is known after one more character."""

    def holds(self, seen: Seen) -> bool:
        """Whether the condition holds if the text ends here."""


@dataclass(frozen=True)
class Compared:
    """The number is at least `bound`, or at most `bound`, which is a decimal number.

    What is known: whether there is a sign, then (phase, place, order): in phase 0, `place` digits
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
        # -0 is 0, whose order to 0 is 0.
        if signed:
            order = -order if self.bound <= 0 else -1
        elif self.bound < 0:
            order = 1
        return order >= 0 if self.at_least else order <= 0


@dataclass(frozen=True)
class Multiple:
    """The number is a multiple of a decimal number `divisor` above 0, or, if not `wanted`, is none.

    What is known: digits after the point (-1 before it, and no more than the divisor has), and the
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

        Of 1000, only the number of zeros at the end matters, which makes 4 in place of 1000.
        """
        modulus = self.moduli[0]
        if len(self.moduli) > 1:
            return list(range(modulus))
        smallest: dict[tuple[int, ...], int] = {}
        # By length, the only further digits, if any, that lead to a multiple. From some length on
        # there always are some, and they say what the remainder is but for factors 2 and 5.
        powers = [10**length for length in range(len(str(modulus)) + 1)]
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
    """The number is written as an integer; or, if not `wanted`, it is none.

    So 1.0 is neither: drafts of JSON Schema disagree on whether it is an integer.
    """

    wanted: bool = True
    start: Seen = (0,)

    def after(self, seen: Seen, char: str) -> Seen:
        """0: no point; 1: a point, and zeros behind it; 2: another digit behind it."""
        if char == ".":
            return (1,)
        return (2,) if seen == (1,) and char not in "-0" else seen

    def holds(self, seen: Seen) -> bool:
        """Whether there is no point, or a digit other than 0 behind it."""
        return seen == (0,) if self.wanted else seen == (2,)


def decimal_digits(number: Fraction) -> tuple[str, str]:
    """The digits of a decimal number >= 0, before and after the point; "" if it is an integer.

    Raises:
        ValueError: it has endlessly many digits.
    """
    places = decimal_places(number)
    whole, part = divmod(int(number * 10**places), 10**places)
    return str(whole), f"{part:0{places}}" if places else ""


def decimal_places(number: Fraction) -> int:
    """Digits after the point.

    Raises:
        ValueError: they are endlessly many.
    """
    twos = (number.denominator & -number.denominator).bit_length() - 1
    fives, rest = 0, number.denominator >> twos
    while rest % 5 == 0:
        fives, rest = fives + 1, rest // 5
    if rest != 1:
        raise ValueError(f"{number} has endlessly many digits")
    return max(twos, fives)


def least_common_multiple(numbers: tuple[Fraction, ...]) -> Fraction:
    """The smallest number above 0 that is a multiple of all of some numbers above 0."""
    return Fraction(
        lcm(*(number.numerator for number in numbers)),
        gcd(*(number.denominator for number in numbers)),
    )


def _order(left: str, right: str) -> int:
    return (left > right) - (left < right)
