"""What a steady step of DiffusionGemma costs at its published sizes, by the choice of kernels.

The whole step counts: self-conditioning, noise, head, algorithm, canvas update. Without the
backbone, on a fake accelerator; how kernels are counted is said in `fake_steps`.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.engine import answers_of_child
from vllm_dllm.engine.readout_noise import TILE_BYTES_GPU

pytestmark = pytest.mark.long

# Kernels, requests, and the most kernels that a step may launch. With Triton the sampler is
# compiled, too.
LIMITS = [
    ("torch", 1, 600),
    ("torch", 16, 2_500),
    ("torch", 64, 7_500),
    ("triton", 1, 60),
    ("triton", 16, 60),
    ("triton", 64, 60),
]
CANVAS = 256
Costs = dict[tuple[str, int, int], dict[str, Any]]


@pytest.fixture(
    scope="module",
    params=[pytest.param(n, id=f"{n} requests") for n in (1, 16, 64)],
)
def costs(request: pytest.FixtureRequest) -> Costs:
    """The cost of each case with so many requests."""
    cases = [case for case in LIMITS if case[1] == request.param]
    found = answers_of_child("head_child", [case[:2] for case in cases])
    return dict(zip(cases, found, strict=True))


def test_kernels(costs: Costs) -> None:
    for (kernels, _, limit), cost in costs.items():
        assert cost["kernels"] <= limit, cost
        if kernels == "triton":
            launched = {"rows_kernel", "merge_kernel", "weights_kernel", "sum_kernel"}
            assert set(cost["launched"]) == launched
            assert {"compiled _temperatures", "compiled step_noise", "compiled finish"} <= set(
                cost["by_file"]
            )


def test_temporaries_stay_below_the_budget(costs: Costs) -> None:
    """Beside what is returned, and with Triton some numbers for each row and split."""
    for (kernels, requests, _), cost in costs.items():
        few = 1024 * CANVAS * requests if kernels == "triton" else 0
        assert cost["peak"] - cost["result"] <= TILE_BYTES_GPU + few
