"""SDAR, dense and with experts, against `transformers` under an explicit block-causal mask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import answers_of_child
from tests.support.reference_sdar import Reference, random_checkpoint
from tests.support.sdar_requests import assert_exact, requests

FUSED: dict[str, Any] = {"additional_config": {"dllm": {"fused_commit": "on"}}}
FUSED_SYNC: dict[str, Any] = {
    "additional_config": {"dllm": {"fused_commit": "on", "execution": "sync"}}
}
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "fdfo, a step ahead": {"async_scheduling": True},
    "two blocks": {"async_scheduling": True, **FUSED},
    "two blocks, sync": {"async_scheduling": True, **FUSED_SYNC},
    "sync": {"additional_config": {"dllm": {"execution": "sync"}}},
    # Chunks of a prompt, and what is cached is read again the second time.
    "chunks": {"max_num_batched_tokens": 64, "max_num_seqs": 2, "block_size": 32},
    # So few pages that running requests take them from each other, one step ahead.
    "preempted": {
        **{"num_gpu_blocks_override": 10, "max_model_len": 192, "async_scheduling": True},
        "block_size": 32,
    },
    "two blocks, chunks": {
        **{"max_num_batched_tokens": 64, "max_num_seqs": 2, "block_size": 32, **FUSED},
        "async_scheduling": True,
    },
    "two blocks, preempted": {
        **{"num_gpu_blocks_override": 10, "max_model_len": 192, "async_scheduling": True, **FUSED},
        "block_size": 32,
    },
}


# Every way to commit, with pages enough and with too few of them.
QUICK = ("plain", "fdfo, a step ahead", "two blocks", "two blocks, preempted")


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize(
    ("experts", "block", "names"),
    [
        pytest.param(False, 4, QUICK, id="dense-4-quick"),
        *(
            pytest.param(
                *(experts, block, tuple(ENGINES)),
                id=f"{'experts' if experts else 'dense'}-{block}",
                marks=pytest.mark.long,
            )
            for experts in (False, True)
            for block in (4, 8, 32)
        ),
    ],
)
def test_the_published_rules_equal_transformers(
    tmp_path: Path, experts: bool, block: int, names: tuple[str, ...]
) -> None:
    """Token for token, alone and together, however the requests are scheduled."""
    model = random_checkpoint(tmp_path, experts, block, tied=block == 8)
    wanted, robust, asked = requests(model, block)
    assert len(wanted[8].tokens) <= 7
    found = answers_of_child("sdar_child", model, block, asked, [ENGINES[name] for name in names])
    for name, engine in zip(names, found, strict=True):
        assert engine["model"] == ("SDARMoeForCausalLM" if experts else "SDARForCausalLM")
        assert engine["length"] == block
        assert_exact(name, engine, wanted, robust)


def test_the_reference_sees_a_whole_block(tmp_path: Path) -> None:
    """A later token of its block changes a position's logits; one behind its block does not."""
    reference = Reference(random_checkpoint(tmp_path, experts=False, block=4))
    tokens = list(range(12))
    changed = [*tokens[:7], 200, *tokens[8:]]
    differs = (reference.logits(tokens, 4) - reference.logits(changed, 4)).abs().amax(1) > 1e-3
    assert differs.tolist() == [n >= 4 for n in range(12)]
