"""The benchmark of prefill: its cuts, fits and figures, and that it refuses wrong answers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import prefill
from benchmarks.records import Record
from benchmarks.tables import section
from tests.support.checkpoints import ROOT


def answer(tokens: tuple[int, ...] = (5, 6), logprobs: tuple[float, ...] = (-1.0, -2.0)) -> Any:
    return prefill.Answer(tokens, logprobs)


@pytest.mark.parametrize(
    "other",
    [answer(tokens=(5, 7)), answer(logprobs=(-1.0, -2.1)), answer(logprobs=(-1.0, float("nan")))],
)
def test_prefill_refuses_answers_that_differ(other: prefill.Answer) -> None:
    with pytest.raises(prefill.WrongAnswerError, match="512 tokens"):
        prefill.check_same("512 tokens", answer(), other)
    prefill.check_same("512 tokens", answer(), answer(logprobs=(-1.0, -2.00001)))


def test_three_cuts_of_a_prompt() -> None:
    cuts = prefill.cuts(128, middle=256, block=32)
    assert cuts[prefill.WHOLE].chunks == (128,)
    assert cuts[prefill.BLOCKS].chunks == (32,) * 4
    assert cuts[prefill.BLOCKS].prompt == cuts[prefill.WHOLE].prompt
    fixed = cuts[prefill.FIXED]
    assert (fixed.before, fixed.chunks, len(fixed.prompt)) == (192, (128,), 320)


def test_prefill_fits() -> None:
    straight = prefill.fit({"100": 12.0, "200": 22.0, "400": 42.0})
    assert straight["line"] == pytest.approx([2.0, 100.0])
    assert 0.9 < straight["exponent"] < 1
    assert prefill.fit({"10": 1.0, "100": 100.0})["exponent"] == pytest.approx(2)
    assert prefill.fit({"10": 1.0}) is None


def test_prefill_gains_are_of_the_minima_and_of_the_rounds() -> None:
    times = {prefill.WHOLE: [1.0, 2.0], prefill.BLOCKS: [4.0, 4.0], prefill.FIXED: [1.0, 1.0]}
    found = prefill.figures({name: {"64": samples} for name, samples in times.items()})
    assert found["gain"] == {"64": 4.0}
    assert found["gain_median"] == {"64": 3.0}
    assert found["ways"][prefill.WHOLE]["64"]["samples_ms"] == [1.0, 2.0]


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.long
def test_prefill_in_short(tmp_path: Path) -> None:
    path = tmp_path / "prefill.json"
    done = subprocess.run(
        [
            *(sys.executable, str(ROOT / "benchmarks" / "prefill.py"), "--lengths", "64", "128"),
            *("--repeats", "2", "--json", str(path)),
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    record = Record.read(path)
    assert record.fields["machine"]["load_average"]
    assert "| 128 |" in section("prefill", {"prefill": record})
    assert set(record.results["gain"]) == {"64", "128"}
