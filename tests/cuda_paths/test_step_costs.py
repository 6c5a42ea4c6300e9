"""What admissions and steps cost at the published sizes: kernels, copies, and waits.

Counted on a fake accelerator, in a process of its own.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.engine import answers_of_child


def costs(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The costs of each case, see `tests.support.fake_steps.main`."""
    return answers_of_child("fake_steps", cases, package="tests.support")


@pytest.fixture(scope="module")
def steady() -> dict[int, dict[str, Any]]:
    """A steady greedy step of LLaDA2.0-mini, by the number of requests."""
    sizes = (1, 16)
    found = costs([{"model": "llada2", "canvases": n} for n in sizes])
    return {n: cost["step"] for n, cost in zip(sizes, found, strict=True)}


def test_kernels(steady: dict[int, dict[str, Any]]) -> None:
    assert {n: sum(cost["kernels"].values()) for n, cost in steady.items()} == {1: 148, 16: 159}
