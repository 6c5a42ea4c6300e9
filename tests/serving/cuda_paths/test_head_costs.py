"""What a steady step of DiffusionGemma costs at its published sizes, by the choice of kernels.

The whole step counts: self-conditioning, noise, head, algorithm, canvas update. Without the
backbone, on a fake accelerator; how kernels are counted is said in `head_child`.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.engine import answers_of_child
from vllm_dllm.engine.readout import TILE_BYTES_GPU

# Kernels, requests, whether the sampler is compiled (as vLLM compiles models by default), and the
# most kernels that a step may launch.
LIMITS = [
    ("torch", 1, False, 600),
    ("torch", 16, False, 2_500),
    ("torch", 64, False, 7_500),
    ("triton", 1, True, 60),
    ("triton", 16, True, 60),
    ("triton", 64, True, 60),
]
CANVAS = 256


@pytest.fixture(scope="module")
def costs() -> dict[tuple[str, int], dict[str, Any]]:
    found = answers_of_child("head_child", [case[:3] for case in LIMITS])
    return {case[:2]: cost for case, cost in zip(LIMITS, found, strict=True)}


@pytest.mark.parametrize(("kernels", "requests", "compiled", "limit"), LIMITS)
def test_kernels(
    kernels: str, requests: int, compiled: bool, limit: int, costs: dict[tuple[str, int], Any]
) -> None:
    cost = costs[kernels, requests]
    assert cost["kernels"] <= limit, cost
    if kernels == "triton":
        launched = {"head_kernel", "head_draw_kernel", "weights_kernel", "sum_kernel"}
        assert set(cost["launched"]) == launched
        assert {"compiled read_rows", "compiled step_noise", "compiled _finish"} <= set(
            cost["by_file"]
        )


@pytest.mark.parametrize(("kernels", "requests"), [case[:2] for case in LIMITS])
def test_temporaries_stay_below_the_budget(
    kernels: str, requests: int, costs: dict[tuple[str, int], Any]
) -> None:
    """Beside what is returned, and with Triton some numbers for each row and split."""
    cost = costs[kernels, requests]
    few = 1024 * CANVAS * requests if kernels == "triton" else 0
    assert cost["peak"] - cost["result"] <= TILE_BYTES_GPU + few
