"""Structured output where it is hard: of random weights, which know no task, and of few pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.checkpoints import TEXT_ONLY_OPTIONS, TINY
from tests.support.constrained import CASES, MODELS, fuzz, with_random_weights
from tests.support.engine import count_calls, engine

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.mark.parametrize("family", ["gemma", pytest.param("llada2", marks=pytest.mark.long)])
def test_every_output_is_valid_and_finished(family: str, tmp_path: Path) -> None:
    path = with_random_weights(TINY / MODELS[family][0], tmp_path / family, 3)
    with engine(path, 32, max_num_seqs=32, **TEXT_ONLY_OPTIONS) as started:
        fuzz(started, family, CASES // 10, 2)


@pytest.mark.parametrize(
    ("family", "pages"), [("llada2", 24), pytest.param("gemma", 44, marks=pytest.mark.long)]
)
def test_preempted_outputs_are_valid_and_finished(family: str, pages: int) -> None:
    """Few pages: requests give theirs up, between canvases and within one, and take up again."""
    few = {"num_gpu_blocks_override": pages, "block_size": 32, "max_model_len": 320}
    path = TINY / MODELS[family][0]
    with engine(path, 32, max_num_seqs=32, **few, **TEXT_ONLY_OPTIONS) as started:
        preempted = count_calls(started.scheduler, "_preempt_request")
        fuzz(started, family, CASES // 10, 3)
        assert preempted
