"""Hold what a schema's keywords together say about the strings or numbers that it allows."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class StringFacts:
    """Strings with all of these properties.

    Attributes:
        least: characters (code points) that a string has at least.
        most: characters that it has at most; None means any number.
        patterns: regular expressions of JSON Schema, each of which is found in it.
        formats: names of formats that it has.
        excluded: a string that has the properties of any of these is left out.
    """

    least: int = 0
    most: int | None = None
    patterns: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    excluded: tuple[StringFacts, ...] = ()


@dataclass(frozen=True)
class NumberFacts:
    """Numbers with all of these properties.

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
