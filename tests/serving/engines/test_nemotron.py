"""Nemotron-Labs-Diffusion against plain loops over `transformers`' Ministral 3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import answers_of_child
from tests.support.nemotron_requests import requests
from tests.support.reference_nemotron import VOCABULARY, Reference, random_checkpoint
from tests.support.sdar_requests import assert_exact

AHEAD: dict[str, Any] = {"async_scheduling": True}
TOGETHER: dict[str, Any] = {"additional_config": {"dllm": {"execution": "sync"}}}
# So few pages that running requests take them from each other.
SMALL: dict[str, Any] = {"num_gpu_blocks_override": 10, "max_model_len": 192, "block_size": 32}
# Chunks of a prompt, and what is cached is read again the second time.
CHUNKS: dict[str, Any] = {"max_num_batched_tokens": 40, "max_num_seqs": 2, "block_size": 32}
COMMITS: dict[str, Any] = {"additional_config": {"dllm": {"skip_last_commit": False}}}
WHOLE: dict[str, Any] = {"additional_config": {"dllm": {"eos_early_stop": False}}}
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "a step ahead": AHEAD,
    "sync": TOGETHER,
    "sync, a step ahead": AHEAD | TOGETHER,
    "chunks": CHUNKS,
    "chunks, a step ahead": CHUNKS | AHEAD,
    "preempted": SMALL,
    "preempted, a step ahead": SMALL | AHEAD,
    "every canvas is committed": COMMITS,
    "no canvas ends early": WHOLE,
}
QUICK = ("plain", "preempted, a step ahead")


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize(
    ("block", "names"),
    [
        pytest.param(8, QUICK, id="8-quick"),
        *(
            pytest.param(block, tuple(ENGINES), id=f"{block}", marks=pytest.mark.long)
            for block in (5, 8, 32)
        ),
    ],
)
def test_the_published_rules_equal_transformers(
    tmp_path: Path, block: int, names: tuple[str, ...]
) -> None:
    """Token for token, alone and together, however the requests are scheduled."""
    model = random_checkpoint(tmp_path, block)
    wanted, robust, asked = requests(model, block)
    found = answers_of_child("sdar_child", model, block, asked, [ENGINES[name] for name in names])
    for name, engine in zip(names, found, strict=True):
        assert engine["model"] == "NemotronLabsDiffusionModel"
        assert engine["length"] == block
        assert_exact(name, engine, wanted, robust)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("block", [5, 8])
def test_two_ranks_equal_transformers(tmp_path: Path, block: int) -> None:
    """Token for token, with partial sums over ranks."""
    model = random_checkpoint(tmp_path, block)
    wanted, robust, asked = requests(model, block)
    names = ("plain", "a step ahead", "sync", "preempted, a step ahead")
    options = [ENGINES[name] | {"tensor_parallel_size": 2} for name in names]
    found = answers_of_child("sdar_ranks_child", model, asked, options)
    for name, engine in zip(names, found, strict=True):
        assert_exact(name, engine, wanted, robust)


def test_the_reference_sees_a_canvas_in_both_directions(tmp_path: Path) -> None:
    """A later token changes the logits of its canvas, and none before that."""
    reference = Reference(random_checkpoint(tmp_path, block=4))
    context, canvas = list(range(60)), [7, 8, 9, 10]
    before = reference.logits(context, canvas)
    after = reference.logits(context, [*canvas[:3], 11])
    assert before.shape == (64, VOCABULARY)
    assert before[:60].equal(after[:60])
    assert all(not before[n].equal(after[n]) for n in range(60, 64))
    far = reference.logits([5, *context[1:]], canvas)
    assert all(not before[n].equal(far[n]) for n in range(64))
