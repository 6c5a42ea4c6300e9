"""SDAR, dense and with experts, against `transformers` under an explicit block-causal mask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import answers_of_child
from tests.support.reference_sdar import RULES, Answer, Reference, Rule, random_checkpoint

# Tokens of the prompt and tokens to generate: shorter and longer than a block, beginning and ending
# on its edges and inside of it.
SHAPES = (
    *((1, 5), (3, 13), (4, 8), (7, 1), (8, 33), (16, 24), (21, 17), (32, 40), (40, 30), (61, 21)),
    *((96, 12), (115, 20)),
)
SETTINGS = (
    Rule(),
    Rule(threshold=0.2),
    Rule(threshold=0.5, steps=2),
    Rule("LowConfidenceStatic"),
    Rule("LowConfidenceStatic", steps=3),
    Rule("Sequential", steps=2),
    Rule("Sequential"),
    Rule("EntropyBounded"),
    Rule("EntropyBounded", entropy_bound=6.0),
    Rule(threshold=0.3, steps=3),
    Rule("LowConfidenceStatic", steps=2),
    Rule("EntropyBounded", entropy_bound=3.0),
)
# Decisions closer than this may legitimately fall differently in another order of summation.
MARGIN = 3e-5
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


def reference_answers(model: Path, block: int, stops: dict[int, int]) -> list[Answer]:
    reference = Reference(model)
    return [
        reference.generate(prompt(n, length), count, rule, block, (stops[n],) if n in stops else ())
        for n, ((length, count), rule) in enumerate(zip(SHAPES, SETTINGS, strict=True))
    ]


def prompt(number: int, length: int) -> list[int]:
    return [(37 * i * i + 11 * i + number) % 290 for i in range(1, length + 1)]


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
@pytest.mark.parametrize("block", [4, 8, 32])
def test_the_published_rules_equal_transformers(tmp_path: Path, experts: bool, block: int) -> None:
    """Token for token, alone and together, however the requests are scheduled."""
    model = random_checkpoint(tmp_path, experts, block, tied=block == 8)
    # One of the long answers ends early, at its seventh token.
    stops = {8: reference_answers(model, block, {})[8].tokens[6]}
    wanted = reference_answers(model, block, stops)
    assert len(wanted[8].tokens) <= 7
    robust = [n for n, answer in enumerate(wanted) if answer.margin > MARGIN]
    assert len(robust) >= len(SHAPES) - 2, "too many near ties to compare"
    assert {SETTINGS[n].name for n in robust} == set(RULES)
    asked = [
        {
            "prompt": prompt(n, length),
            "max_tokens": count,
            "stop": [stops[n]] if n in stops else [],
            "options": SETTINGS[n].options(),
        }
        for n, (length, count) in enumerate(SHAPES)
    ]
    found = answers_of_child(
        "sdar_child", model, block, asked, list(ENGINES.values()), package="tests.families"
    )
    for name, engine in zip(ENGINES, found, strict=True):
        assert engine["model"] == ("SDARMoeForCausalLM" if experts else "SDARForCausalLM")
        assert engine["length"] == block
        assert (engine["preemptions"] > 0) == ("preempted" in name), name
        for answers in engine["answers"]:
            different = [n for n in robust if answers[n] != wanted[n].tokens]
            assert not different, (name, different)


def test_the_reference_sees_a_whole_block(tmp_path: Path) -> None:
    """A later token of its block changes a position's logits; one behind its block does not."""
    reference = Reference(random_checkpoint(tmp_path, experts=False, block=4))
    tokens = list(range(12))
    changed = [*tokens[:7], 200, *tokens[8:]]
    differs = (reference.logits(tokens, 4) - reference.logits(changed, 4)).abs().amax(1) > 1e-3
    assert differs.tolist() == [n >= 4 for n in range(12)]
