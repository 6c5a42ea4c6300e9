"""Test helper: an engine of three seats, and what may happen to one of its requests.

A victim runs beside two others that occupy the rest of the engine. An event hits it in a known
phase of its life, or it ends; then `assert_unnoticed` and `assert_end` say what must hold.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tests.support.drive import Driver, Family, assert_nothing_held, replaced
from tests.support.engine import Engine, count_calls
from vllm_dllm.engine.slots import Phase

# Name, canvas (0 is the one behind the prompt), phase and step there, as the worker has them.
CANVAS_PHASES = {
    "last-chunk-with-tail": (0, Phase.DENOISE, 0),
    "denoise-1": (0, Phase.DENOISE, 1),
    "denoise-2": (0, Phase.DENOISE, 2),
    "converged": (0, Phase.COMMIT, None),
    # With async scheduling the commit has run, and the scheduler has not heard of it. Where commits
    # are fused it has not: the canvas has left, and its keys and values are still to be written.
    "commit-in-flight": (1, Phase.DENOISE, 0),
    "second-canvas": (1, Phase.DENOISE, 3),
}
PHASES = ("waiting", "mid-prefill", *CANVAS_PHASES)
# What each catches, beside a wrong token and a leaked block:
EVENTS = {
    "abort": "the slot's next request inherits a canvas, or a result that was in flight",
    "preempt": "the scheduler's own: a stale result is counted, output is lost or comes twice",
    "reset": "all requests at once: results in flight are dropped, and made again",
    "abort-while-preempted": "a request that waits for its second turn is not found",
}
# Tokens of the bystanders' prompts; of a step: three canvases, and chunks shorter than the victim.
MASKED = ("llada2", "diffcoder", "nemotron")
LENGTHS = {**dict.fromkeys(MASKED, (13, 30)), "gemma": (40, 21)}
BUDGET = {**dict.fromkeys(MASKED, 32), "gemma": 100}


@dataclass
class World:
    """An engine of three seats, its requests, and what each of them gives alone."""

    family: Family
    running: Engine
    asked: dict[str, tuple[list[int], Any]]
    alone: dict[str, list[int]]
    asynchronous: bool

    @property
    def fused(self) -> bool:
        return bool(self.running.runner.model_state.policy.fused)

    @classmethod
    def make(
        cls, family: Family, running: Engine, asynchronous: bool, temperature: float = 0.0
    ) -> World:
        near, far = family.prompts(LENGTHS[family.name], seed=2)
        (new,) = family.prompts((family.length + 3,), seed=4)
        (victim,) = family.prompts((75 if family.name == "gemma" else 45,), seed=5)
        tokens = 4 * family.length
        asked = {
            "near": (near, family.params(tokens, ignore_eos=True, seed=1)),
            "far": (far, family.params(tokens, ignore_eos=True, seed=2)),
            "newcomer": (new, family.params(family.length + 5, ignore_eos=True, seed=3)),
            "victim": (victim, family.params(3 * family.length, ignore_eos=True, seed=5)),
        }
        if family.name == "gemma":
            temperature = 1.5  # else its canvases settle to the same in any step
        for _, params in asked.values():
            params.temperature = temperature
        alone = {name: running.generate([p], [q])[0][0] for name, (p, q) in asked.items()}
        return cls(family, running, asked, alone, asynchronous)

    def begin(self) -> Driver:
        """Two requests that denoise, and a third that has just been added."""
        assert_nothing_held(self.running)
        driver = Driver(self.running)
        for name in ("near", "far"):
            driver.add(name, *self.asked[name])

        def denoises(name: str) -> bool:
            found = driver.canvas(name)
            # A step of this canvas, or of one before it.
            return found is not None and (found[2] > 0 or found[1] > len(self.asked[name][0]))

        driver.until(lambda: denoises("near") and denoises("far"))
        driver.add("victim", *self.asked["victim"])
        return driver

    def reach(self, driver: Driver, phase: str) -> None:
        """Step on until the victim is in this phase."""
        if phase == "waiting":
            assert driver.slot("victim") is None
            return
        prompt, length = self.asked["victim"][0], self.family.length
        base = len(prompt) - self.family.tail(prompt)

        def mid_prefill() -> bool:
            return 0 < driver.request("victim").num_computed_tokens < len(prompt)

        def in_phase() -> bool:
            n, kind, step = CANVAS_PHASES[phase]
            found = driver.canvas("victim")
            return (
                found is not None
                and found[:2] == (kind, base + n * length)
                and step in (None, found[2])
                and driver.request("victim").num_computed_tokens >= base
            )

        driver.until(mid_prefill if phase == "mid-prefill" else in_phase)
        assert len(self.running.core.batch_queue or ()) == self.asynchronous
        if phase == "commit-in-flight":
            emitted = driver.request("victim").num_output_tokens
            assert (emitted == 0) == self.asynchronous


def abort(world: World, driver: Driver) -> None:
    world.running.llm.llm_engine.abort_request(["victim"])
    assert driver.request("victim") is None


def preempt(world: World, driver: Driver) -> None:
    """No block for the victim's next step: it is the last that runs, so the scheduler takes it."""
    manager, victim = world.running.scheduler.kv_cache_manager, driver.request("victim")
    assert world.running.scheduler.running[-1] is victim
    allocate, refused = manager.allocate_slots, []

    def none_left(request: Any, *args: Any, **kwargs: Any) -> Any:
        if request is victim and not refused:
            refused.append(request)
            return None
        return allocate(request, *args, **kwargs)

    with replaced(manager, "allocate_slots", none_left):
        driver.until(lambda: bool(refused))
    assert victim.num_preemptions == 1


def reset(world: World, driver: Driver) -> None:
    """vLLM's own way to take everything back, as after an update of the weights."""
    scheduler = world.running.scheduler
    preempted = count_calls(scheduler, "_preempt_request")
    assert world.running.core.reset_prefix_cache(reset_running_requests=True)
    del scheduler._preempt_request
    assert len(preempted) >= 2


def abort_while_preempted(world: World, driver: Driver) -> None:
    victim, scheduler = driver.request("victim"), world.running.scheduler
    scheduler.running.remove(victim)
    scheduler._preempt_request(victim, time.monotonic(), drop_stale_output=True)
    scheduler.prev_step_scheduled_req_ids.discard(victim.request_id)
    abort(world, driver)


ACTIONS: dict[str, Callable[[World, Driver], None]] = {
    "abort": abort,
    "preempt": preempt,
    "reset": reset,
    "abort-while-preempted": abort_while_preempted,
}


def assert_unnoticed(world: World, driver: Driver, event: str) -> None:
    """The event hits the victim now; nobody else's tokens change, nor its own but by an abort."""
    slot = driver.slot("victim")
    ACTIONS[event](world, driver)
    # At once, before a result in flight comes back: it must not be taken for the newcomer's.
    driver.add("newcomer", *world.asked["newcomer"])
    if event == "abort" and slot is not None:
        driver.until(lambda: driver.slot("newcomer") is not None)
        assert driver.slot("newcomer") == slot
    tokens = driver.finish()
    if event.startswith("abort"):
        cut = tokens.pop("victim", [])
        assert cut == world.alone["victim"][: len(cut)]
        assert tokens == {n: t for n, t in world.alone.items() if n != "victim"}
    else:
        assert tokens == world.alone
    assert_nothing_held(world.running)


def ends(world: World) -> dict[str, tuple[dict[str, Any], int, str]]:
    """Ways for the victim to end: (parameters, number of tokens, reason)."""
    whole, length = world.alone["victim"], world.family.length
    opened = length - world.family.tail(world.asked["victim"][0])

    def first(low: int) -> int:
        """A token that stands nowhere before, at or after ``low``."""
        return next(i for i in range(low, len(whole)) if whole[i] not in whole[:i])

    inside, second = first(1), first(opened + 1)
    return {
        "one-token": ({"max_tokens": 1}, 1, "length"),
        "first-canvas": ({"max_tokens": opened}, opened, "length"),
        "one-after": ({"max_tokens": opened + 1}, opened + 1, "length"),
        "two-canvases": ({"max_tokens": opened + length}, opened + length, "length"),
        "stop-token": ({"stop_token_ids": [whole[inside]]}, inside + 1, "stop"),
        "late-stop-token": ({"stop_token_ids": [whole[second]]}, second + 1, "stop"),
    }


def assert_end(world: World, options: dict[str, Any], wanted: list[int], reason: str) -> None:
    """The victim ends so; whoever follows in its slot finds nothing of it."""
    prompt, params = world.asked["victim"]
    changed = params.clone()
    for name, value in options.items():
        setattr(changed, name, value)
    with_end = replace(world, asked=world.asked | {"victim": (prompt, changed)})
    driver = with_end.begin()
    driver.until(lambda: driver.slot("victim") is not None)
    slot = driver.slot("victim")
    driver.until(lambda: driver.request("victim") is None)
    driver.add("newcomer", *world.asked["newcomer"])
    driver.until(lambda: driver.slot("newcomer") is not None)
    assert driver.slot("newcomer") == slot
    got = driver.finish()
    assert got == world.alone | {"victim": wanted}
    assert driver.outputs["victim"].finish_reason == reason
    assert_nothing_held(world.running)
