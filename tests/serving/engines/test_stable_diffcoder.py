"""Stable-DiffCoder against `transformers`' Llama under an explicit block-causal mask."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serving.engines.test_sdar import ENGINES, QUICK
from tests.serving.engines.test_sdar_lora import LORA, generate
from tests.support.adapters import adapter, merged
from tests.support.drive import TWO_BLOCKS, Family
from tests.support.engine import answers_of_child, engine, greedy
from tests.support.lifecycle import BUDGET, EVENTS, PHASES, World, assert_unnoticed
from tests.support.reference_diffcoder import (
    BLOCK,
    MARGIN,
    MASK,
    Answer,
    Reference,
    Rule,
    random_checkpoint,
)
from tests.support.sdar_requests import assert_exact

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# Prompts that begin and end everywhere in a block, short ones and over several pages.
LENGTHS = (*range(1, 2 * BLOCK + 3), 31, 32, 33, 61, 97, 114)
RULES = (
    *(Rule(), Rule(0.3), Rule(None), Rule(None, steps=3), Rule(0.6), Rule(None, steps=2)),
    Rule(None, steps=1),
)
# Blocks that are committed in passes of their own.
SEPARATE: dict[str, Any] = {"additional_config": {"dllm": {"fused_commit": "off"}}}
# How checkpoints may differ from the published ones.
VARIANTS: dict[str, dict[str, Any]] = {
    "biased": {"attention_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "stretched": {
        "rope_parameters": {
            **{"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0},
            **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
            "original_max_position_embeddings": 64,
        }
    },
    "blocks of 8": {"block_size": 8},
    "another mask": {"mask_token_id": 299},
    "first release": {"first_release": True},
}


def prompt(number: int, length: int) -> list[int]:
    """Tokens of which some are the mask, which is an ordinary token there."""
    return [MASK if i % 13 == 4 else (37 * i * i + 11 * i + number) % 290 for i in range(length)]


def requests(
    model: Path, block: int = BLOCK, mask: int = MASK
) -> tuple[list[Answer], list[int], list[dict[str, Any]]]:
    """The answers that are wanted, those that no order of summation changes, and what is asked."""
    reference, wanted, asked = Reference(model, block, mask), list[Answer](), []
    for n, length in enumerate(LENGTHS):
        count, rule, stop = 5 + 7 * n % 18, RULES[n % len(RULES)], []
        answer = reference.generate(prompt(n, length), count, rule)
        if n % 5 == 3:  # ends early, mostly inside a block
            stop = [answer.tokens[len(answer.tokens) // 2]]
            answer = reference.generate(prompt(n, length), count, rule, tuple(stop))
        wanted.append(answer)
        request = {"prompt": prompt(n, length), "max_tokens": count, "stop": stop}
        asked.append(request | {"options": rule.options()})
    robust = [n for n, answer in enumerate(wanted) if answer.margin > MARGIN]
    assert len(robust) >= len(LENGTHS) - 2, "too many near ties to compare"
    assert {2, 3, 4} & {count for n in robust for count in wanted[n].decided}
    return wanted, robust, asked


def compare(model: Path, names: dict[str, dict[str, Any]], block: int = BLOCK, **of: int) -> None:
    """Each engine's tokens together, out of the cache, and alone are the reference's."""
    wanted, robust, asked = requests(model, block, **of)
    found = answers_of_child("sdar_child", model, block, asked, list(names.values()))
    for name, answers in zip(names, found, strict=True):
        assert answers["model"] in ("StableDiffcoderForCausalLM", "SeedDiffcoderForCausalLM")
        assert answers["length"] == block
        assert_exact(name, answers, wanted, robust)


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("fdfo, a step ahead",), id="quick"),
        pytest.param(tuple(ENGINES), id="all", marks=pytest.mark.long),
    ],
)
def test_equals_transformers(tmp_path: Path, names: tuple[str, ...]) -> None:
    """Token for token, however requests are scheduled and blocks committed."""
    compare(random_checkpoint(tmp_path / "model"), {name: ENGINES[name] for name in names})


@pytest.mark.long
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_equal_transformers(tmp_path: Path, variant: str) -> None:
    """Fine-tuned models with other parts, blocks, masks and positions."""
    changes = VARIANTS[variant]
    model = random_checkpoint(tmp_path / "model", **changes)
    names = {name: ENGINES[name] for name in QUICK}
    compare(model, names, changes.get("block_size", BLOCK), mask=changes.get("mask_token_id", MASK))


@pytest.mark.long
def test_a_compiled_engine_equals_transformers(tmp_path: Path) -> None:
    """With vLLM's default flags, which compile the backbone."""
    compare(random_checkpoint(tmp_path / "model"), {"compiled": {"enforce_eager": False}})


@pytest.mark.long
@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_two_ranks_equal_transformers(tmp_path: Path, axis: str) -> None:
    model = random_checkpoint(tmp_path / "model")
    wanted, robust, asked = requests(model)
    names = ("fdfo, a step ahead", "chunks", "two blocks, preempted")
    options = [ENGINES[name] | {f"{axis}_parallel_size": 2} for name in names]
    found = answers_of_child("sdar_ranks_child", model, asked, options)
    for name, answers in zip(names, found, strict=True):
        assert_exact(name, answers, wanted, robust)


@pytest.mark.long
def test_every_request_its_adapter(tmp_path: Path) -> None:
    """LoRA: the tokens of a checkpoint whose weights hold the adapter."""
    model = random_checkpoint(tmp_path / "model")
    adapters = [None, adapter(model, tmp_path / "adapter", 1)]
    paths = [model, merged(model, tmp_path / "adapter", tmp_path / "merged")]
    cases = []
    for number, path in enumerate(paths):
        reference = Reference(path)
        for n, length in enumerate(LENGTHS[::2]):
            rule = RULES[n % len(RULES)]
            answer = reference.generate(prompt(n, length), 11, rule)
            cases.append((number, prompt(n, length), 11, rule, answer))
    robust = [case for case in cases if case[-1].margin > MARGIN]
    assert len(robust) >= len(cases) - 2
    with engine(model, BLOCK, **(LORA | {"diffusion_config": None})) as running:
        for _ in range(2):
            found = [tokens for tokens, _ in generate(running, adapters, robust)]
            assert found == [case[-1].tokens for case in robust]
        running.assert_idle()


@pytest.mark.long
def test_an_end_inside_a_block(tmp_path: Path) -> None:
    """The checkpoint's own end token, with masks of the same block behind it."""
    model = random_checkpoint(tmp_path / "model")
    reference, prompts = Reference(model), [prompt(n, 5 + n) for n in range(12)]
    (end,) = reference.generate(prompts[0], 10, Rule()).tokens[5:6]
    ended = random_checkpoint(tmp_path / "ended", eos_token_id=end)
    wanted = [reference.generate(tokens, 30, Rule(), (end,)) for tokens in prompts]
    assert any(1 < len(answer.tokens) < 30 for answer in wanted)
    with engine(ended, BLOCK, diffusion_config=None, async_scheduling=True) as running:
        for (tokens, _), answer in zip(
            running.generate(prompts, [greedy(30)] * len(prompts)), wanted, strict=True
        ):
            assert answer.margin < MARGIN or tokens == answer.tokens
        running.assert_idle()


WORLDS: dict[str, dict[str, Any]] = {
    "sync": {"async_scheduling": False, **SEPARATE},
    "async": {"async_scheduling": True, **SEPARATE},
    "granted": {"async_scheduling": True},
    "two blocks": TWO_BLOCKS,
}


@pytest.fixture(scope="module", params=WORLDS)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """An engine of three seats, whose requests decide one position a step."""
    model = random_checkpoint(tmp_path_factory.mktemp("diffcoder") / "model")
    family = Family(
        "diffcoder",
        model,
        BLOCK,
        aligned=True,
        vocabulary=range(6, 290),
        engine={"diffusion_config": None},
        slow={"diffusion_threshold": 2.0},
        quick={"diffusion_threshold": 0.0},
    )
    way = WORLDS[request.param]
    with family.start(max_num_seqs=3, max_num_batched_tokens=BUDGET["diffcoder"], **way) as running:
        made = World.make(family, running, way["async_scheduling"])
        assert made.fused == (request.param in ("granted", "two blocks"))
        reference = Reference(model)
        for name, (tokens, params) in made.asked.items():
            answer = reference.generate(tokens, params.max_tokens, Rule(2.0))
            assert answer.margin < MARGIN or made.alone[name] == answer.tokens
        yield made


@pytest.mark.long
@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase != "waiting"])
def test_event_in_phase(world: World, phase: str, event: str) -> None:
    """In a prompt, in every step of a canvas, and at its commit: nobody's tokens change."""
    if phase == "converged" and world.fused:
        pytest.skip("no canvas waits for a pass of its own")
    driver = world.begin()
    world.reach(driver, phase)
    assert_unnoticed(world, driver, event)
