"""What a schema says about single values: the conditions on one string, and on one number."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class StringFacts:
    """Conditions on a string; all of them hold.

    Attributes:
        least: the fewest characters.
        most: the most characters, or None.
        patterns: regular expressions, each of which is found in the string.
        formats: names of formats, each of which the string has.
        excluded: texts that fit any of these are left out.
    """

    least: int = 0
    most: int | None = None
    patterns: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    excluded: tuple[StringFacts, ...] = ()


@dataclass(frozen=True)
class NumberFacts:
    """Conditions on a number; all of them hold.

    Attributes:
        integer: whether it is a whole number.
        least: the lowest value, or None.
        above: whether the lowest value itself is excluded.
        most: the highest value, or None.
        below: whether the highest value itself is excluded.
        multiples: numbers, of each of which it is a multiple.
        excluded: numbers that fit any of these are left out.
    """

    integer: bool = False
    least: Fraction | None = None
    above: bool = False
    most: Fraction | None = None
    below: bool = False
    multiples: tuple[Fraction, ...] = ()
    excluded: tuple[NumberFacts, ...] = ()
