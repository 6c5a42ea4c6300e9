"""LLaDA2.2 against a reference in plain loops: block routing, and decoding that edits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.serving.engines.test_sdar import ENGINES
from tests.support.drive import Family
from tests.support.engine import answers_of_child
from tests.support.lifecycle import BUDGET, World, assert_end, assert_unnoticed, ends
from tests.support.reference_llada22 import Answer, Reference22, Rule, random_checkpoint22
from tests.support.sdar_requests import MARGIN, assert_exact

pytestmark = [pytest.mark.engine, pytest.mark.slow]

MASK, DELETE, SPLIT = 299, 290, 291
RULE = Rule(MASK, DELETE, SPLIT, threshold=0.3, max_post_edit_steps=4)
RULES = (
    RULE,
    replace(RULE, threshold=0.6, steps=3),
    replace(RULE, edit_threshold=0.2),
    replace(RULE, max_post_edit_steps=0),
    replace(RULE, threshold=1.0, steps=12, edit_threshold=0.4, max_post_edit_steps=2),
    replace(RULE, edit_threshold=1.0, max_post_edit_steps=1),
)
# Shares the batches of the editing rule, which asks for more of each row.
OTHER = {"diffusion_algorithm": "LowConfidence", "diffusion_threshold": 0.3}
PARTS = {"delete", "split", "cut", "escape", "last round", "unchanged", "too few are sure",
         "other than an edit"}  # fmt: skip


def prompts(block: int) -> list[list[int]]:
    """Of every length around the edges of blocks; with the ids of masks and edits."""
    near = range(1, 2 * block + 2) if block == 8 else (1, 2, 17, *range(30, 36), *range(62, 66))
    lengths = [*near, 2 * block, 3 * block - 1, 4 * block + 3, 96]
    made = [
        [(37 * i * i + 11 * i + n) % 289 for i in range(1, k + 1)] for n, k in enumerate(lengths)
    ]
    for n, prompt in enumerate(made):
        if n % 3 == 1:
            prompt[-1] = (MASK, DELETE, SPLIT)[n // 3 % 3]
            prompt[len(prompt) // 2] = MASK
    return made


def asked_and_wanted(
    model: Path, block: int
) -> tuple[list[Answer], list[int], list[dict[str, Any]], Counter[str]]:
    """The answers of the reference, those that rounding cannot change, and the requests."""
    reference = Reference22.load(model, block, MASK)
    wanted, asked, events = [], [], Counter[str]()
    for n, prompt in enumerate(prompts(block)):
        count, rule, stop = (block + 3, 2 * block, 7)[n % 3], RULES[n % len(RULES)], []
        if n % 7 == 6:
            tokens, margin = reference.generate(prompt, 0.3, count, set())
            wanted.append(Answer(tokens, Counter(), margin))
            options = OTHER
        else:
            answer = reference.generate_in_del(prompt, rule, count)
            if n % 5 == 2:  # ends inside a block
                stop = [answer.tokens[min(4, len(answer.tokens) - 1)]]
                answer = reference.generate_in_del(prompt, rule, count, tuple(stop))
            wanted.append(answer)
            events += answer.events
            options = rule.options()
        asked.append({"prompt": prompt, "max_tokens": count, "stop": stop, "options": options})
    robust = [n for n, answer in enumerate(wanted) if answer.margin > MARGIN]
    return wanted, robust, asked, events


QUICK = ("plain", "two blocks, preempted")


@pytest.mark.parametrize(
    ("block", "names"),
    [
        pytest.param(8, QUICK, id="8-quick"),
        pytest.param(8, tuple(ENGINES), id="8", marks=pytest.mark.long),
        pytest.param(32, tuple(ENGINES), id="32", marks=pytest.mark.long),
    ],
)
def test_equals_the_reference(tmp_path: Path, block: int, names: tuple[str, ...]) -> None:
    """Token for token, alone and together, however the requests are scheduled."""
    random_checkpoint22(tmp_path, block)
    wanted, robust, asked, events = asked_and_wanted(tmp_path, block)
    assert len(robust) >= len(asked) - 2, "too many near ties to compare"
    assert block != 8 or set(+events) >= PARTS, events
    found = answers_of_child(
        "sdar_child", tmp_path, block, asked, [ENGINES[name] for name in names]
    )
    for name, engine in zip(names, found, strict=True):
        assert engine["model"] == "LLaDA22MoeModelLM"
        assert engine["length"] == block
        assert_exact(name, engine, wanted, robust)


@pytest.mark.long
@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_two_ranks_equal_the_reference(tmp_path: Path, axis: str) -> None:
    random_checkpoint22(tmp_path, 8)
    wanted, robust, asked, _ = asked_and_wanted(tmp_path, 8)
    names = ["plain", "fdfo, a step ahead", "chunks", "two blocks, preempted"]
    options = [ENGINES[name] | {f"{axis}_parallel_size": 2} for name in names]
    found = answers_of_child("sdar_ranks_child", tmp_path, asked, options)
    for name, engine in zip(names, found, strict=True):
        assert_exact(name, engine, wanted, robust)


@pytest.mark.long
def test_compiled_equals_the_reference(tmp_path: Path) -> None:
    """With vLLM's default flags: the model and the step are compiled."""
    random_checkpoint22(tmp_path, 8)
    wanted, robust, asked, _ = asked_and_wanted(tmp_path, 8)
    options = {"enforce_eager": False, "async_scheduling": True}
    (found,) = answers_of_child("sdar_child", tmp_path, 8, asked, [options])
    assert_exact("compiled", found, wanted, robust)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    path = tmp_path_factory.mktemp("llada22")
    random_checkpoint22(path, 8)
    slow = replace(RULE, threshold=1.0).options()
    family = Family("llada2", path, 8, True, range(5, 280), {}, slow, RULE.options())
    options = {"max_num_seqs": 3, "max_num_batched_tokens": BUDGET["llada2"]}
    with family.start(async_scheduling=True, **options) as running:
        yield World.make(family, running, asynchronous=True)


@pytest.mark.long
@pytest.mark.parametrize("phase", ["mid-prefill", "denoise-2", "converged", "second-canvas"])
@pytest.mark.parametrize("event", ["preempt", "reset", "abort", "abort-while-preempted"])
def test_event_in_phase(world: World, phase: str, event: str) -> None:
    """Nobody else notices, and the state of an edited canvas is not inherited."""
    driver = world.begin()
    world.reach(driver, phase)
    assert_unnoticed(world, driver, event)


@pytest.mark.long
@pytest.mark.parametrize("name", ["one-token", "first-canvas", "one-after", "late-stop-token"])
def test_end(world: World, name: str) -> None:
    options, tokens, reason = ends(world)[name]
    assert_end(world, options, world.alone["victim"][:tokens], reason)
