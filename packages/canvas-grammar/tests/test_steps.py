"""What a compilation may cost is counted in steps, so that its status is the same everywhere."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from unittest import mock
from zoneinfo import available_timezones

import pytest
from canvas_grammar import CompileLimits, Constraint, ConstraintError, limits
from canvas_grammar.automaton import compilation
from canvas_grammar.automaton.compilation import compile_constraint
from canvas_grammar_support.helpers import pieces, record, tiny

ZONES = Constraint.from_value("json_schema", record(zone={"enum": sorted(available_timezones())}))


def steps(constraint: Constraint) -> int:
    within = mock.patch.object(compilation, "counted", lambda _: nullcontext())
    with limits.counted(CompileLimits()) as counts, within:
        compile_constraint(constraint, pieces(), CompileLimits())
    return counts[1] - counts[0]


def test_a_count_ends_with_its_compilation() -> None:
    with pytest.raises(ConstraintError, match="more than 1 steps"):
        compile_constraint(ZONES, pieces(), replace(CompileLimits(), steps=1))
    limits.spend(10**12)


def test_real_use_is_far_from_the_limit() -> None:
    assert len(available_timezones()) > 590
    assert 0 < steps(ZONES) < CompileLimits().steps / 10
    assert compile_constraint(ZONES, tiny(), CompileLimits()).minimum > 1


def test_one_step_decides() -> None:
    """It is a count: the same each time, and one less is too few."""
    words = Constraint.from_value("choice", sorted(available_timezones()))
    taken = steps(words)
    assert steps(words) == taken
    exact = replace(CompileLimits(), steps=taken)
    assert compile_constraint(words, pieces(), exact)
    with pytest.raises(ConstraintError, match=rf"takes more than {taken - 1} steps to compile"):
        compile_constraint(words, pieces(), replace(exact, steps=taken - 1))
