"""The comparison of a quantized checkpoint with its original."""

from __future__ import annotations

import pytest

from benchmarks.accuracy import agreement, recovery
from examples.tiny.tasks import Problem


@pytest.mark.parametrize(
    ("first", "second", "share"),
    [
        ([[1, 2, 3]], [[1, 2, 3]], 1.0),
        ([[1, 2, 3]], [[1, 9, 3]], 2 / 3),
        ([[1, 2]], [[1, 2, 3, 4]], 0.5),
        ([[]], [[]], 1.0),
    ],
)
def test_agreement(first: list[list[int]], second: list[list[int]], share: float) -> None:
    assert agreement(first, second) == pytest.approx(share)


def test_recovery_counts_what_is_lost_and_gained() -> None:
    problems = [Problem("add", str(n), str(n)) for n in range(4)]
    quantized = {"answers": ["0", "x", "2", "x"], "tokens": [[0]] * 4, "steps_per_block": 6.0}
    original = {"answers": ["0", "1", "x", "3"], "tokens": [[0]] * 4, "steps_per_block": 3.0}
    found = recovery(quantized, original, problems)
    assert found["recovery_percent"] == pytest.approx(100 * 2 / 3)
    assert (found["lost"], found["gained"]) == (2, 1)
    assert found["steps_ratio"] == 2
