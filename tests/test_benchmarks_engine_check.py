"""The check of the router's simulation: its times, its verdict, and in short the real engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import engine_check
from benchmarks.engine_check import Clock, deviation, drawn, prompt_of
from benchmarks.measured_times import Times, between, line, middle
from benchmarks.tables import TABLES
from tests.support.checkpoints import ROOT

TIMES = Times({1: 0.010, 2: 0.012, 4: 0.020}, first=0.005, token=0.0001, begun=0.002, passes=33)


def test_times_between_measured_ones() -> None:
    assert [between(TIMES.denoise, n) for n in (1, 2, 3, 4)] == pytest.approx(
        [0.010, 0.012, 0.016, 0.020]
    )
    assert between(TIMES.denoise, 5) == 0.020  # nothing beyond the largest


def test_steps_with_and_without_prompts() -> None:
    assert TIMES.step_seconds(2, 0, 0) == 0.012
    assert TIMES.step_seconds(2, 100, 1) == pytest.approx(0.024)
    assert TIMES.step_seconds(0, 100, 3) == pytest.approx(0.021)


def test_a_line_through_points() -> None:
    assert line([(1, 3.0), (2, 5.0), (4, 9.0)]) == pytest.approx((1.0, 2.0))


def test_the_middle_of_two_calibrations() -> None:
    other = Times({1: 0.020, 2: 0.012, 4: 0.022}, first=0.007, token=0.0003, begun=0.004, passes=33)
    found = middle(TIMES, other)
    assert found.denoise == pytest.approx({1: 0.015, 2: 0.012, 4: 0.021})
    assert (found.first, found.token, found.begun) == pytest.approx((0.006, 0.0002, 0.003))
    assert found.passes == 33


def test_prompts_begin_alike_and_differ() -> None:
    one, same, other = prompt_of(1, 10), prompt_of(1, 11), prompt_of(2, 10)
    assert len(one) == engine_check.SHARED + engine_check.OWN
    assert one[: engine_check.SHARED] == same[: engine_check.SHARED]
    assert one != same and one[: engine_check.SHARED] != other[: engine_check.SHARED]
    assert one == prompt_of(1, 10)


def test_requests_of_a_round() -> None:
    requests = drawn(200, rate=10.0, passes=33, seed=1)
    assert requests == drawn(200, rate=10.0, passes=33, seed=1) != drawn(200, 10.0, 33, seed=2)
    assert requests[-1].arrival == pytest.approx(20.0)
    assert {one.passes for one in requests} == {33}
    assert {one.prefix for one in requests} == set(range(engine_check.PREFIXES))


def test_the_processor_s_clock_skips_waiting() -> None:
    clock = Clock("cpu")
    begin = clock.now()
    clock.wait(1000.0)
    assert 1000 <= clock.now() - begin < 1010
    wall = Clock("wall")
    begin = wall.now()
    wall.wait(0.01)
    assert wall.now() - begin >= 0.01


def test_the_deviation_is_that_of_the_medians() -> None:
    def of(simulated: float, real: float) -> dict[str, Any]:
        return {"simulated": {"p50_ms": simulated}, "real": {"p50_ms": real}}

    rounds = [of(100, 80), of(110, 100), of(120, 400)]
    assert deviation(rounds, "p50_ms") == pytest.approx(0.1)
    assert deviation([of(0, 0)], "p50_ms") == 0
    assert deviation([of(1, 0)], "p50_ms") == float("inf")


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("limit", "status"), [("100000", 0), ("0", 1)])
def test_the_check_in_short(tmp_path: Path, limit: str, status: int) -> None:
    """Every request is answered, the cache's hits are as simulated, and the limit decides."""
    path = tmp_path / "check.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "router_simulation.py"), "--check"]
    command += ["--rounds", "1", "--requests", "12", "--limit", limit]
    command += ["--clock", "cpu", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr[-2000:]
    results = json.loads(path.read_text())["results"]
    (found,) = results["rounds"]
    # Fixed by the requests: no time has a say in it.
    assert found["real"]["hit_rate"] == pytest.approx(found["simulated"]["hit_rate"])
    assert found["calibration"]["passes"] >= engine_check.OUTPUT
    for name in ("router_steps", "router_check"):
        rows = list(TABLES[name].rows(results))
        assert len({len(row) for row in rows}) == 1 and len(rows) >= 2
