"""``dllm.blocks``: what start-up makes of it, and refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.startup.test_commit_choice import config
from tests.support.reference_diffcoder import random_checkpoint as diffcoder
from tests.support.reference_sdar import random_checkpoint
from vllm_dllm.vllm_seams.registration import RefusedError


@pytest.fixture(scope="module")
def sdar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("sdar"), experts=False, block=4)


def blocks(count: int, **settings: Any) -> dict[str, Any]:
    return {"additional_config": {"dllm": {"blocks": count, **settings}}}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_canvas_holds_the_blocks(sdar: Path, asynchronous: bool) -> None:
    found = config(sdar, async_scheduling=asynchronous, max_num_seqs=2, **blocks(4))
    served = found.model_config.dllm
    assert (served.length, served.window_length, found.num_speculative_tokens) == (4, 16, 16)
    assert served.commits == "separate"
    assert found.cache_config.block_size % 4 == 0


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (blocks(4, fused_commit="on"), "fused_commit=on: impossible, because all blocks of a"),
        (blocks(4, algorithm="Sequential"), "dllm.algorithm: Sequential cannot decode several"),
        (blocks(4) | {"max_model_len": 12}, "dllm.blocks=4: the context of 12 tokens has no room"),
        (blocks(64) | {"max_num_batched_tokens": 128}, "max_num_batched_tokens=128 is below"),
        (blocks(0), "dllm.blocks must be at least 1"),
        (blocks(65), "dllm.blocks must be at least 1 and at most 64"),
    ],
)
def test_refusals(sdar: Path, options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(RefusedError, match=complaint):
        config(sdar, **options)


def test_other_families_refuse(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="StableDiffCoder cannot decode several"):
        config(diffcoder(tmp_path), **blocks(2))
