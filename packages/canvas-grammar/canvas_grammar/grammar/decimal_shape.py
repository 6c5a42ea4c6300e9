"""How decimal numbers with bounds or divisors are written: how many digits they may have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from canvas_grammar.grammar.decimal_conditions import Multiple, decimal_places
from canvas_grammar.grammar.json_facts import NumberFacts
from canvas_grammar.limits import ConstraintError

DIGITS = 15  # that a double keeps apart
FRACTION = 6  # digits after the point, if the bounds have fewer
MOST_FRACTION = 12
MOST_WHOLE = 40  # digits before the point up to which everything between two bounds is offered
MOST_REMAINDERS = 1_000
LARGEST_MODULUS = 100_000  # of which the remainders are looked at
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
    def of(cls, facts: NumberFacts) -> Shape:
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
        """The next characters, and the positions behind them."""
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
    """All bounds, also of what is excluded."""
    yield from (bound for bound in (facts.least, facts.most) if bound is not None)
    for excluded in facts.excluded:
        yield from bounds(excluded)


def divisors(facts: NumberFacts) -> Iterator[Fraction]:
    """All numbers of which there are to be multiples, also in what is excluded."""
    yield from facts.multiples
    for excluded in facts.excluded:
        yield from divisors(excluded)
