"""JSON Schema's own test suite and real schemas: nothing that is offered or accepted is invalid.

A part of them, and random schemas. `VLLM_DLLM_SCHEMAS=1` checks every schema, and
`VLLM_DLLM_CASES=5000` so many random ones.
"""

from __future__ import annotations

import os
import re
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from canvas_grammar.automaton.vocabulary import Vocabulary
from canvas_grammar_support.helpers import tiny
from canvas_grammar_support.schemas.checks import KEYWORDS, Report, check, refused_for
from canvas_grammar_support.schemas.corpora import DRAFTS, REAL, Case, real_cases, suite_cases
from canvas_grammar_support.schemas.large_vocabulary import published
from canvas_grammar_support.schemas.strategies import whole_schemas
from hypothesis import HealthCheck, given, settings

# One of so many schemas is checked with each vocabulary. Drafts repeat each other's schemas, so
# what one draft's part leaves out another's often has.
PART = int(os.environ.get("VLLM_DLLM_SCHEMAS", "0"))
OF_SUITE, OF_SUITE_LARGE, OF_REAL, OF_REAL_LARGE = (PART,) * 4 if PART else (24, 300, 60, 400)
RANDOM = int(os.environ.get("VLLM_DLLM_CASES", "50"))
WALKS = 10
REASONS = {*KEYWORDS, "size", "false"}
# Groups of real schemas of which some have patterns that take minutes to become automata. A server
# lets others go first, and here nothing ends a compilation.
WITH_LONG_ONES = ("Handwritten", "JsonSchemaStore", "Snowplow")


def part(cases: Sequence[Case], divisor: int) -> list[Case]:
    """One of so many, the same in every run."""
    return [case for case in cases if zlib.crc32(case.name.encode()) % divisor == 0]


def violations(
    cases: Sequence[Case], vocabulary: Vocabulary, *, canvases: bool = False
) -> tuple[list[str], list[Report]]:
    """What is wrong, a line for each schema, and the reports of those that were compiled."""
    found, compiled = [], []
    refused: Counter[str] = Counter()
    for case in cases:
        report = check(case, vocabulary, WALKS, canvases=canvases)
        if report.refused is not None:
            reason = refused_for(report.refused)
            assert reason in REASONS, (case.name, report.refused)
            assert reason == "size" or re.match(r"\S+: ", report.refused), "a place comes first"
            refused[reason] += 1
            continue
        compiled.append(report)
        if wrong := [*report.problems, *report.wrong]:
            text, why = wrong[0]
            found.append(f"{case.name}: {len(wrong)} texts, such as {text[:300]} ({why})")
    print(f"{len(compiled)} compiled; refused: {refused.most_common()}")
    return found, compiled


@pytest.mark.parametrize("draft", DRAFTS)
def test_the_suite(draft: str) -> None:
    cases = [case for case in suite_cases() if case.draft == draft]
    found, compiled = violations(part(cases, OF_SUITE), tiny())
    assert not found, "\n".join(found)
    assert sum(report.invalid for report in compiled) > 5
    accepted, valid = (sum(report.valid[n] for report in compiled) for n in (1, 0))
    assert accepted > 0.4 * valid > 2, (accepted, valid)


def test_the_suite_with_a_large_vocabulary() -> None:
    found, compiled = violations(part(suite_cases(), OF_SUITE_LARGE), published())
    assert not found, "\n".join(found)
    assert len(compiled) > 2


def test_the_suite_in_canvases() -> None:
    found, compiled = violations(part(suite_cases(), 4 * OF_SUITE), tiny(), canvases=True)
    assert not found, "\n".join(found)
    assert len(compiled) > 10


@settings(max_examples=RANDOM, deadline=None, suppress_health_check=list(HealthCheck))
@given(whole_schemas())
def test_random_schemas(drawn: tuple[str, dict[str, Any]]) -> None:
    draft, schema = drawn
    report = check(Case("random", draft, schema, ()), tiny(), 20)
    assert report.refused or not report.problems, report.problems[:3]


@pytest.mark.skipif(not REAL.exists(), reason="../shared/json_schemas is not beside the project")
@pytest.mark.parametrize(
    ("vocabulary", "divisor"), [(tiny, OF_REAL), (published, OF_REAL_LARGE)], ids=["tiny", "large"]
)
def test_real_schemas(vocabulary, divisor: int) -> None:
    cases = [case for case in real_cases() if case.name.split("/")[1] not in WITH_LONG_ONES]
    found, compiled = violations(part(cases, divisor), vocabulary())
    assert not found, "\n".join(found)
    assert compiled
