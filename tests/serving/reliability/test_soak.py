"""The soak in its short form, and proof that each of its rules can fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.soak import Size, run
from tests.support.soak.client import (
    ABORTED,
    COMPLETED,
    REFUSED,
)
from tests.support.soak.faults import FROZEN, GARBAGE, HALF_SENT, SLOW_READERS
from tests.support.soak.models import MODELS
from tests.support.soak.requests import MASKED, UNIFORM, draw_pool
from vllm_dllm.decoding.names import algorithm_names

SIZES = {
    "llada2": Size(requests=350, distinct=80),
    "sdar": Size(requests=350, distinct=80),
    "gemma": Size(requests=250, distinct=50),
}


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_soak(name: str, tmp_path: Path) -> None:
    report = run(MODELS[name], SIZES[name], tmp_path / "log")
    print("\n".join(report.lines()))
    assert not report.wrong, "\n".join(report.wrong)
    # It was a soak: every kind of request was among them, and pages ran out.
    assert sum(report.counts.values()) == SIZES[name].requests
    assert min(report.counts[status] for status in (COMPLETED, ABORTED, REFUSED)) > 5
    assert report.preemptions > 0
    assert set(report.faults) == {HALF_SENT, GARBAGE, FROZEN, SLOW_READERS}
    assert min(report.faults.values()) > 0
    assert report.alone > 0.9 * SIZES[name].distinct


# ---- the mix


def test_every_algorithm_is_asked_for() -> None:
    """Who adds an algorithm adds it to the soak."""
    assert set(MASKED) == set(algorithm_names("mask", of_every_model=True))
    assert set(UNIFORM) == set(algorithm_names("uniform"))
    pool = draw_pool(150, "mask", seed=0)
    asked = {ask.body["vllm_xargs"].get("diffusion_algorithm") for ask in pool}
    assert asked == {None, *MASKED}


def test_the_front_end_is_asked_for() -> None:
    asked = [ask.body for ask in draw_pool(150, "mask", 0, frontend=True, adapters=("a", "b"))]
    assert {body.get("model") for body in asked} == {None, "a", "b"}
    for name in ("tools", "stop", "priority", "n"):
        assert sum(name in body for body in asked) >= 5, name
