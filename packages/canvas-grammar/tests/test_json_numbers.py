"""Numbers within bounds, multiples and exclusions, for exact readers and for those with doubles."""

from __future__ import annotations

import json
import math
import re
from decimal import Decimal
from fractions import Fraction

import pytest
from canvas_grammar.grammar.json_numbers import NumberFacts, number_language, number_tree
from canvas_grammar.limits import ConstraintError
from canvas_grammar_support.derivations import derives, drawn
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

JSON_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
BOUNDS = st.one_of(
    st.integers(-1300, 1300).map(Fraction),
    st.decimals(-50, 50, places=3).map(Fraction),
    st.integers(-(10**19), 10**19).map(Fraction),
    st.floats(-1e25, 1e25).map(lambda x: Fraction(repr(x))).filter(lambda x: abs(x) > 1e-12),
    st.sampled_from([Fraction("0.1"), Fraction("0.3"), Fraction(0), Fraction(2**53 + 1),
                     Fraction(2**63 - 1), Fraction("1e23"), Fraction("-3.75"), Fraction("1e300")]),
)  # fmt: skip
MULTIPLES = st.sampled_from(
    [Fraction(text) for text in ("1", "2", "3", "7", "12", "2.5", "0.5", "0.01", "0.1", "6.75")]
)
PLAIN = {
    "integer": st.booleans(),
    "least": st.none() | BOUNDS,
    "above": st.booleans(),
    "most": st.none() | BOUNDS,
    "below": st.booleans(),
    "multiples": st.just(()) | st.lists(MULTIPLES, min_size=1, max_size=2).map(tuple),
}
EXCLUDED = st.just(()) | st.builds(NumberFacts, **PLAIN).map(lambda facts: (facts,))
TWICE = EXCLUDED | st.builds(NumberFacts, excluded=EXCLUDED, **PLAIN).map(lambda facts: (facts,))


def all_readings(text: str, facts: NumberFacts) -> set[bool]:
    """Whether a number fits, for each way to read it and the bounds.

    Python keeps integers exact: those of the text, and those of the schema.
    """
    exact, double = Fraction(text), Fraction(float(text))
    python = exact if re.fullmatch(r"-?\d+", text) else double

    def rounded(bound: Fraction) -> Fraction:
        return Fraction(float(bound))

    def kept(bound: Fraction) -> Fraction:
        return bound if bound.denominator == 1 else rounded(bound)

    readings = (exact, lambda bound: bound), (double, rounded), (python, rounded), (python, kept)
    return {fits(value, text, facts, read) for value, read in readings}


def fits(value: Fraction, text: str, facts: NumberFacts, read) -> bool:  # type: ignore[no-untyped-def]
    if facts.least is not None:
        least = read(facts.least)
        if value < least or (facts.above and value == least):
            return False
    if facts.most is not None:
        most = read(facts.most)
        if value > most or (facts.below and value == most):
            return False
    if facts.integer and (value.denominator != 1 or "." in text):
        return False
    # Multiples are multiples of exact numbers; the rounding of doubles would say nothing.
    if any(Fraction(text) % divisor for divisor in facts.multiples):
        return False
    return not any(fits(value, text, excluded, read) for excluded in facts.excluded)


def texts_near(facts: NumberFacts) -> set[str]:
    """Texts at the bounds of facts, and close to them."""
    found = {"0", "-0", "1", "-1", "0.5", "-0.5", "7", "12.5"}
    for bound in (facts.least, facts.most):
        if bound is not None:
            for step in ("0", "1", "-1", "0.000001", "-0.000001", "0.5", "1e-15", "-1e-15"):
                value = bound + Fraction(step)
                decimal = Decimal(value.numerator) / Decimal(value.denominator)
                found |= {f"{decimal:f}", f"{decimal:.6f}", f"{decimal:.0f}"}
    return {text for text in found if JSON_NUMBER.fullmatch(text)}


@settings(max_examples=120, deadline=None)
@given(st.builds(NumberFacts, excluded=TWICE, **PLAIN))
@example(NumberFacts(least=Fraction("0.1"), above=True, most=Fraction("0.3"), below=True))
@example(NumberFacts(least=Fraction("1e22"), most=Fraction("1e23")))
@example(NumberFacts(most=Fraction(2**63 - 1), integer=True))
@example(NumberFacts(least=Fraction(2**53 + 1), above=True, integer=True))
def test_what_is_offered_fits(facts: NumberFacts) -> None:
    try:
        language = number_tree(facts)
    except ConstraintError as error:
        assert re.search("no number with up to|goes with numbers of up to", str(error))
        return
    near = {text for text in texts_near(facts) if derives(language, text)}
    for text in near.union(drawn(language, 40)):
        assert JSON_NUMBER.fullmatch(text), text
        assert all_readings(text, facts) == {True}, text


@settings(max_examples=100, deadline=None)
@given(st.integers(-1300, 1300), st.integers(0, 1300), st.lists(st.integers(-2000, 2000)))
def test_every_integer_between_two_bounds_is_offered(
    low: int, span: int, values: list[int]
) -> None:
    language = number_tree(
        NumberFacts(integer=True, least=Fraction(low), most=Fraction(low + span))
    )
    for value in (*values, low - 1, low, low + span, low + span + 1):
        assert derives(language, str(value)) == (low <= value <= low + span), value


@settings(max_examples=100, deadline=None)
@given(
    st.decimals(-30, 30, places=2), st.decimals(0, 30, places=2), st.booleans(), st.booleans(),
    st.lists(st.decimals(-40, 70, places=3), min_size=8),
)  # fmt: skip
def test_every_short_decimal_between_two_bounds_is_offered(
    low: Decimal, span: Decimal, above: bool, below: bool, values: list[Decimal]
) -> None:
    assume(span > 0)
    facts = NumberFacts(least=Fraction(low), above=above, most=Fraction(low + span), below=below)
    language = number_tree(facts)
    for value in (*values, low, low + span, low + Decimal("0.001")):
        inside = low <= value <= low + span
        inside &= not (above and value == low) and not (below and value == low + span)
        # With and without zeros at the end.
        for text in (f"{value:f}", f"{value.normalize():f}", f"{value:f}00"):
            if "." in text or "00" not in text:
                assert derives(language, text) == inside, text


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 1000), st.integers(-3000, 3000))
def test_multiples_of_small_integers(divisor: int, value: int) -> None:
    for integer in (True, False):
        facts = NumberFacts(integer=integer, multiples=(Fraction(divisor),))
        found = number_tree(facts)
        assert derives(found, str(value)) == (value % divisor == 0)
        multiple = value * divisor
        if abs(multiple) < 10 ** len(str(divisor)):
            assert derives(found, str(multiple))


@pytest.mark.parametrize(
    ("divisor", "inside", "outside"),
    [
        ("0.01", ["0.07", "0", "-3.1", "20.20", "3"], ["0.001", "0.005", "1.000"]),
        ("0.25", ["0.75", "1.5", "1.50", "-2", "0.00"], ["0.7", "0.8", "0.05"]),
        ("2.5", ["5", "7.5", "10.0"], ["7", "2.55", "1"]),
        ("6.75", ["6.75", "13.50", "13.5", "27"], ["6.7", "7", "6.750"]),
        ("3", ["9", "-9", "9.0", "0"], ["9.3", "3.3", "10"]),
    ],
)
def test_decimals_of_multiples(divisor: str, inside: list[str], outside: list[str]) -> None:
    found = number_tree(NumberFacts(multiples=(Fraction(divisor),)))
    assert [text for text in inside if not derives(found, text)] == []
    assert [text for text in outside if derives(found, text)] == []


def test_excluded_values() -> None:
    ten = NumberFacts(least=Fraction(10), most=Fraction(10))
    found = number_tree(NumberFacts(integer=True, excluded=(ten,)))
    assert [n for n in range(-120, 120) if not derives(found, str(n))] == [10]
    # 1.0 is an integer for most drafts, and none for draft-04: it is never offered.
    found = number_tree(NumberFacts(excluded=(NumberFacts(integer=True),)))
    assert derives(found, "1.5") and not derives(found, "1") and not derives(found, "1.0")


def test_integers_that_are_none_are_no_numbers() -> None:
    """A oneOf of two kinds of integers asks for them: no bound need be between."""
    whole = NumberFacts(integer=True)
    for least in (None, Fraction(3)):
        assert number_tree(NumberFacts(integer=True, least=least, excluded=(whole,))).empty


def test_numbers_without_properties() -> None:
    for text in ("0", "-0", "12.50", "-1e5", "1E-07", "2e+9", "123456789012345"):
        assert derives(number_language(NumberFacts()), text), text
        assert math.isfinite(json.loads(text))
    whole = number_language(NumberFacts(integer=True))
    assert derives(whole, "-7") and derives(whole, "0")
    assert not any(derives(whole, text) for text in ("-0", "01", "1.0", "1e2", "1" * 16))


@pytest.mark.parametrize(
    "facts",
    [
        NumberFacts(least=Fraction(2), most=Fraction(1)),
        NumberFacts(least=Fraction(2), most=Fraction(2), below=True),
        NumberFacts(integer=True, least=Fraction("1.2"), most=Fraction("1.8")),
        NumberFacts(least=Fraction(8), most=Fraction(13), multiples=(Fraction(7),)),
    ],
)
def test_impossible_facts_are_the_empty_language(facts: NumberFacts) -> None:
    assert number_language(facts).empty


@pytest.mark.parametrize(
    ("facts", "complaint"),
    [
        (NumberFacts(least=Fraction(10**400)), "go up to 1e308"),
        (NumberFacts(least=Fraction(1, 3)), "not a decimal number"),
        (NumberFacts(multiples=(Fraction(0),)), "multipleOf is a number above 0"),
        (NumberFacts(multiples=(Fraction(100_003),)), "multipleOf 100003 takes 100003 remainders"),
        (NumberFacts(multiples=(Fraction("1e-13"),)), "multipleOf has at most 12 decimals"),
        (NumberFacts(least=Fraction(10**20), multiples=(Fraction(3),)),
         "multipleOf goes with numbers of up to 15 digits"),
        (NumberFacts(least=Fraction("1e-14"), most=Fraction("1e-13")),
         "no number with up to 1 digits before the point and 12 after it"),
    ],
)  # fmt: skip
def test_refused(facts: NumberFacts, complaint: str) -> None:
    with pytest.raises(ConstraintError, match=complaint):
        number_language(facts)
