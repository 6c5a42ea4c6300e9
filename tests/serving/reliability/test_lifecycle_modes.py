"""`test_lifecycle.py` where other settings make other phases.

JointThreshold goes on with a canvas that has no masks left, and counts those steps; with the
server's ``execution: sync`` a finished canvas waits for the others of its batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.drive import TWO_BLOCKS, Driver, Family, assert_nothing_held, gemma, llada2
from tests.support.lifecycle import (
    ACTIONS,
    BUDGET,
    World,
    assert_end,
    assert_unnoticed,
    ends,
)
from vllm_dllm.engine.slots import Phase

pytestmark = [pytest.mark.engine, pytest.mark.slow]

JOINT = {
    "diffusion_algorithm": "JointThreshold",
    "diffusion_threshold": 2.0,
    "diffusion_edit_threshold": 0.0,
    "diffusion_max_post_edit_steps": 2,  # so few that one who inherits a count shows it
}
# Three windows of two blocks, and a chunk that is shorter than the victim.
WIDER = TWO_BLOCKS | {"max_num_batched_tokens": 2 * BUDGET["llada2"]}
TOGETHER = WIDER | {"additional_config": {"dllm": {"execution": "sync", "fused_commit": "on"}}}
LOCKSTEP = {"additional_config": {"dllm": {"execution": "sync"}}}
# Family, what its requests ask for, what its server is set to, and with a step in flight or not.
MODES = {
    "edits-async": ("llada2", JOINT, {}, True),
    "edits-two-blocks": ("llada2", JOINT, WIDER, True),
    "lockstep-two-blocks": ("llada2", None, TOGETHER, True),
    "lockstep": ("llada2", None, LOCKSTEP, False),
    "lockstep-async": ("llada2", None, LOCKSTEP, True),
    "lockstep-gemma-async": ("gemma", None, LOCKSTEP, True),
}


QUICK = ("edits-async", "lockstep-async")


@pytest.fixture(
    scope="module",
    params=[pytest.param(m, marks=() if m in QUICK else pytest.mark.long) for m in MODES],
)
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def world(mode: str, gemma_path: Path) -> Iterator[World]:
    name, asked, options, asynchronous = MODES[mode]
    family = llada2() if name == "llada2" else gemma(gemma_path)
    if asked:
        family = replace(family, slow=asked)
    engine: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": BUDGET[name]}
    engine |= options | {"async_scheduling": asynchronous}
    with family.start(**engine) as running:
        made = World.make(family, running, asynchronous)
        yield made if asked else hurried(made, family)


def hurried(world: World, family: Family) -> World:
    """The victim has finished each canvas in one step, and waits for the others' many."""
    prompt, params = world.asked["victim"]
    quick = family.params(params.max_tokens, "quick", ignore_eos=True, seed=params.seed)
    quick.temperature = params.temperature
    alone = world.running.generate([prompt], [quick])[0][0]
    return replace(
        world,
        asked=world.asked | {"victim": (prompt, quick)},
        alone=world.alone | {"victim": alone},
    )


def reach(world: World, driver: Driver, number: int) -> None:
    """Until the victim's canvas of this number has no mask left, but goes on or waits."""
    prompt, length = world.asked["victim"][0], world.family.length
    start = len(prompt) - world.family.tail(prompt) + number * length
    slots = world.running.slots

    def late() -> bool:
        slot, found = driver.slot("victim"), driver.canvas("victim")
        if slot is None or found is None or found[:2] != (Phase.DENOISE, start):
            return False
        if (
            "JointThreshold" in slots.algorithms.by_name
        ):  # it has edited, and has not come to an end
            return bool(
                slots.algorithms.by_name["JointThreshold"].state["post_edit_steps"][slot] > 0
            )
        return bool(slots.ready[slot] > 0)

    driver.until(late)
    assert len(world.running.core.batch_queue or ()) == world.asynchronous


@pytest.mark.parametrize("number", [0, 2], ids=["first-canvas", "third-canvas"])
@pytest.mark.parametrize("event", ACTIONS)
def test_event_late_in_a_canvas(world: World, event: str, number: int) -> None:
    """Catches a newcomer that inherits the count of edits or the wish to leave, a canvas that is
    denoised again after a preemption, and others that wait for one who has gone."""
    driver = world.begin()
    reach(world, driver, number)
    assert_unnoticed(world, driver, event)


@pytest.mark.parametrize("name", ["one-token", "first-canvas", "one-after", "late-stop-token"])
def test_end(world: World, name: str) -> None:
    """A request ends in a canvas that others had to be waited for, or that was edited."""
    options, tokens, reason = ends(world)[name]
    assert_end(world, options, world.alone["victim"][:tokens], reason)


def test_the_others_leave(world: World) -> None:
    """Whom the victim waits for is gone: it must go on, alone, as if nobody had been there."""
    driver = world.begin()
    reach(world, driver, 0)
    world.running.llm.llm_engine.abort_request(["near", "far"])
    assert driver.finish()["victim"] == world.alone["victim"]
    assert_nothing_held(world.running)


def test_the_victim_is_late(mode: str, world: World) -> None:
    """The cases above are what they say: tokens are rewritten, or a canvas waits for long."""
    driver = world.begin()
    reach(world, driver, 2)
    before, rewritten, steps = driver.canvas("victim"), 0, 0
    slot = driver.slot("victim")
    while driver.canvas("victim") == (*before[:2], before[2] + steps):
        tokens = world.running.slots.tokens[slot].tolist()
        driver.step()
        steps += 1
        rewritten += tokens != world.running.slots.tokens[slot].tolist()
    driver.finish()
    assert steps > 1 if mode.startswith("lockstep") else rewritten
