"""SDAR on several ranks, dense and with experts, against `transformers`: the four rules.

Its blocks are short, and its window may be two of them; see also `test_ranks`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.serving.engines.test_sdar import FUSED, FUSED_SYNC
from tests.support.engine import answers_of_child
from tests.support.reference_sdar import random_checkpoint
from tests.support.sdar_requests import assert_exact, requests

pytestmark = [pytest.mark.engine, pytest.mark.slow]

AHEAD: dict[str, Any] = {"async_scheduling": True}
TOGETHER: dict[str, Any] = {"additional_config": {"dllm": {"execution": "sync"}}}
# So few pages that running requests take them from each other.
SMALL: dict[str, Any] = {"num_gpu_blocks_override": 10, "max_model_len": 192, "block_size": 32}
CHUNKS: dict[str, Any] = {"max_num_batched_tokens": 64, "max_num_seqs": 2, "block_size": 32}
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "a step ahead": AHEAD,
    "sync": TOGETHER,
    "sync, a step ahead": AHEAD | TOGETHER,
    "chunks": AHEAD | CHUNKS,
    "preempted": AHEAD | SMALL,
    "two blocks": AHEAD | FUSED,
    "two blocks, sync": AHEAD | FUSED_SYNC,
    "two blocks, chunks": AHEAD | CHUNKS | FUSED,
    "two blocks, preempted": AHEAD | SMALL | FUSED,
}
# Whole experts on each rank, in the place of a part of every expert. On the CPU that needs another
# kernel, see `tests.support.spread_experts`.
SPREAD: dict[str, Any] = {
    "enable_expert_parallel": True,
    "worker_extension_cls": "tests.support.spread_experts.Recorder",
}
EVERY = [
    pytest.param(axis, experts, block, list(ENGINES), marks=pytest.mark.long)
    for axis in ("tensor", "pipeline")
    for experts in (False, True)
    for block in (4, 8)
]


@pytest.mark.parametrize(
    ("axis", "experts", "block", "names"),
    [
        pytest.param("tensor", False, 4, ["two blocks"], marks=pytest.mark.long),
        pytest.param("pipeline", True, 8, ["two blocks, preempted"], marks=pytest.mark.long),
        *EVERY,
    ],
)
def test_two_ranks_equal_transformers(
    axis: str, experts: bool, block: int, names: list[str], tmp_path: Path
) -> None:
    """Token for token: partial sums over ranks, stages that see no logits, and their windows."""
    model = random_checkpoint(tmp_path, experts, block)
    wanted, robust, asked = requests(model, block)
    options = [ENGINES[name] | {f"{axis}_parallel_size": 2} for name in names]
    found = answers_of_child("sdar_ranks_child", model, asked, options)
    assert len(found) == len(names)
    for name, engine in zip(names, found, strict=True):
        assert engine["two blocks"] == ["two blocks" in name] * 2, name
        assert_exact(name, engine, wanted, robust)


@pytest.mark.long
@pytest.mark.parametrize("block", [4, 8])
def test_spread_experts_equal_transformers(block: int, tmp_path: Path) -> None:
    """Token for token, with half of the experts on each of two ranks."""
    model = random_checkpoint(tmp_path, experts=True, block=block)
    wanted, robust, asked = requests(model, block)
    options = [SPREAD | {"tensor_parallel_size": 2}]
    (found,) = answers_of_child("sdar_ranks_child", model, asked, options)
    assert found["held experts"] == [[4], [4]]
    assert_exact("spread", found, wanted, robust)
