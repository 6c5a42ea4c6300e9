"""What may happen to a request, in every phase of its life: nobody else notices.

A victim runs beside two others that occupy the rest of the engine. An event hits it in a known
phase; then the others' tokens are what they are alone, KV blocks and slots have come back, and
a newcomer that gets the victim's slot is exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support import oracle
from tests.support.drive import (
    TWO_BLOCKS,
    Driver,
    assert_nothing_held,
    gemma,
    llada2,
    replaced,
)
from tests.support.lifecycle import (
    BUDGET,
    EVENTS,
    PHASES,
    World,
    assert_end,
    assert_unnoticed,
    ends,
)
from vllm_dllm.engine.slots import Phase

pytestmark = [pytest.mark.engine, pytest.mark.slow]


WORLDS = [
    *("llada2-async", "llada2-two-blocks"),
    *(
        pytest.param(w, marks=pytest.mark.long)
        for w in ("llada2-sync", "gemma-sync", "gemma-async")
    ),
]


@pytest.fixture(scope="module", params=WORLDS)
def world(request: pytest.FixtureRequest, gemma_path: Path) -> Iterator[World]:
    name, way = request.param.split("-", 1)
    family = llada2() if name == "llada2" else gemma(gemma_path)
    options: dict[str, Any] = {"async_scheduling": way != "sync"}
    budget = BUDGET[name]
    if way == "two-blocks":
        options, budget = TWO_BLOCKS, 2 * budget
    with family.start(max_num_seqs=3, max_num_batched_tokens=budget, **options) as running:
        yield World.make(family, running, way != "sync")


# Who waits has nothing that could be taken from him.
CASES = [
    (phase, event)
    for phase in PHASES
    for event in EVENTS
    if phase != "waiting" or event in ("abort", "reset")
]


@pytest.mark.parametrize(("phase", "event"), CASES)
def test_event_in_phase(world: World, phase: str, event: str) -> None:
    driver = world.begin()
    if phase == "converged" and world.fused:
        driver.until(lambda: never_commits(driver))
        return
    world.reach(driver, phase)
    assert_unnoticed(world, driver, event)


def never_commits(driver: Driver) -> bool:
    """No canvas waits for a pass of its own; true when all requests have ended."""
    assert not any((c := driver.canvas(n)) and c[0] == Phase.COMMIT for n in ("near", "victim"))
    return not driver.running.llm.llm_engine.has_unfinished_requests()


END_NAMES = ("one-token", "first-canvas", "one-after", "two-canvases", "stop-token",
             "late-stop-token")  # fmt: skip


@pytest.mark.parametrize("last_commit", [False, True], ids=["leaves-early", "commits"])
@pytest.mark.parametrize("name", END_NAMES)
def test_end(world: World, name: str, last_commit: bool) -> None:
    """A request ends while denoised (its last canvas leaves early), or with a commit."""
    options, tokens, reason = ends(world)[name]
    decoder = world.running.runner.sampler.canvas_update
    policy = decoder.policy
    if last_commit:
        policy = replace(policy, early=False, skip_last_commit=False, fused=False, granted=False)
    with replaced(decoder, "policy", policy):
        assert_end(world, options, world.alone["victim"][:tokens], reason)


def test_end_of_sequence(world: World) -> None:
    """The checkpoint's own end token, with tokens of the same canvas behind it."""
    name = world.family.name
    if name == "llada2":
        golden = oracle.checkpoint("ckpt_b_b8")
        case = next(c for c in golden.cases if c.id == "p45_mask_full_and_tail/lc_1.01")
        prompt, wanted = golden.prompts[case.prompt].tokens, list(case.output)
        assert case.finish_reason == "stop"
    else:
        prompt = world.family.prompts((75,), seed=10)[0]
        endless = world.family.params(3 * world.family.length, seed=5, ignore_eos=True)
        whole = world.running.generate([prompt], [endless])[0][0]
        end = world.running.llm.get_tokenizer().eos_token_id
        wanted = whole[: whole.index(end) + 1]
    assert len(wanted) > 2 * world.family.length
    params = world.family.params(3 * world.family.length, seed=5)
    changed = replace(world, asked=world.asked | {"victim": (prompt, params)})
    assert_end(changed, {}, wanted, "stop")


def test_stop_string(world: World) -> None:
    """Found behind the engine, which has begun another canvas by then, and is told to abort."""
    tokens, tokenizer = world.alone["victim"], world.running.llm.get_tokenizer()
    whole = tokenizer.decode(tokens)
    words = [tokenizer.decode([token]).strip() for token in tokens]
    at, stop = next(
        (n, word)
        for n, word in enumerate(words)
        if n > world.family.length and word.isascii() and word and whole.find(word) > 0
        and word not in tokenizer.decode(tokens[:n])
    )  # fmt: skip
    prompt, params = world.asked["victim"]
    changed = params.clone()
    changed.stop = [stop]
    driver = replace(world, asked=world.asked | {"victim": (prompt, changed)}).begin()
    driver.until(lambda: "victim" in driver.outputs and driver.request("victim") is None)
    driver.add("newcomer", *world.asked["newcomer"])
    got = driver.finish()
    cut = got.pop("victim")
    assert at < len(cut) <= at + world.family.length
    assert cut == tokens[: len(cut)]
    ended = driver.outputs["victim"]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", stop)
    assert stop not in ended.text
    assert got == {name: t for name, t in world.alone.items() if name != "victim"}
    assert_nothing_held(world.running)
