"""The soak in its short form."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.soak import Size, run
from tests.support.soak.client import ABORTED, COMPLETED, REFUSED
from tests.support.soak.models import MODELS

SIZES = {
    "llada2": Size(requests=350, distinct=80),
    "sdar": Size(requests=350, distinct=80),
    "gemma": Size(requests=250, distinct=50),
}


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", SIZES)
def test_soak(name: str, tmp_path: Path) -> None:
    report = run(MODELS[name], SIZES[name], tmp_path / "log")
    print("\n".join(report.lines()))
    assert not report.wrong, "\n".join(report.wrong)
    # It was a soak: every kind of request was among them, and pages ran out.
    assert sum(report.counts.values()) == SIZES[name].requests
    assert min(report.counts[status] for status in (COMPLETED, ABORTED, REFUSED)) > 5
    assert report.preemptions > 0
    assert min(report.faults.values()) > 0
    assert report.alone > 0.9 * SIZES[name].distinct
