"""Numbers that users set: what is in range, and what the error says."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest

from vllm_dllm.ranges import AlgorithmConfig, Range, SettingsError, nearest, setting, shown


@pytest.mark.parametrize(
    ("allowed", "value", "message"),
    [
        (Range(), -0.1, "x must be finite and at least 0"),
        (Range(), float("nan"), "x must be finite"),
        (Range(), float("inf"), "x must be finite"),
        (Range(), 1e39, "fit 32 bits"),
        (Range(), 10**400, "x must be finite"),
        (Range(), True, "x must be a number, got True"),
        (Range(), "0.5", "x must be a number, got '0.5'"),
        (Range(above=True), 0, "x must be finite and above 0"),
        (Range(most=1.0), 1.5, "x must be at least 0 and at most 1, got 1.5"),
        (Range(whole=True), 2.0, "x must be a whole number, got 2.0"),
        (Range(whole=True), -1, "x must be at least 0"),
        (Range(least=1, whole=True), 2**31, "x must be at least 1"),
    ],
)
def test_out_of_range(allowed: Range, value: object, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        allowed.check("x", value)


def test_in_range() -> None:
    Range().check("x", 0)
    Range().check("x", 1.01)
    Range(above=True).check("x", 1e-9)
    Range(least=1, whole=True).check("x", 2**31 - 1)


@dataclass(frozen=True)
class Example(AlgorithmConfig):
    """Settings of nobody."""

    share: float = setting(0.5, "of the whole", most=1.0)


def test_a_config_checks_itself() -> None:
    assert Example().values() == {"share": 0.5}
    assert Example.ranges()["share"].help == "of the whole"
    with pytest.raises(SettingsError, match="share must be at least 0 and at most 1"):
        Example(share=2)


def test_a_number_that_python_does_not_write_out() -> None:
    with pytest.raises(SettingsError, match="got a very large int"):
        Range().check("x", 10**5000)


def test_what_is_long_is_cut_before_it_is_compared_or_quoted() -> None:
    """A name of 20 MB took 2 s, in which no other request was heard."""
    long = "a" * 20_000_000
    begin = time.process_time()
    for quoted in (
        nearest(long, ["algorithm"]),
        shown(long),
        shown([long, long]),
        shown({long + str(n): n for n in range(3)}),
    ):
        assert len(quoted) < 1000
    assert time.process_time() - begin < 0.5


def test_a_mapping_is_shown_by_its_first_entries() -> None:
    assert shown({"b": 1, "a": 2}) in ("{'b': 1, 'a': 2}", "{'a': 2, 'b': 1}")
    assert shown({n: n for n in range(9)}) == "{0: 0, 1: 1, 2: 2, 3: 3, ...}"
    assert shown({}) == "{}"
