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
    # Of a shifted model: the last block of a prompt is read again for its boundary token.
    "prompt-again": (-1, Phase.COMMIT, None),
}
# What each catches, beside a wrong token and a leaked block:
EVENTS = {
    "abort": "the slot's next request inherits a canvas, or a result that was in flight",
    "preempt": "the scheduler's own: a stale result is counted, output is lost or comes twice",
    "reset": "all requests at once: results in flight are dropped, and made again",
    "abort-while-preempted": "a request that waits for its second turn is not found",
}


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
        near, far = family.prompts(family.lengths[:2], seed=2)
        (new,) = family.prompts(family.lengths[2:3], seed=4)
        (victim,) = family.prompts(family.lengths[3:], seed=5)
        tokens = 4 * family.length
        asked = {
            "near": (near, family.params(tokens, ignore_eos=True, seed=1)),
            "far": (far, family.params(tokens, ignore_eos=True, seed=2)),
            "newcomer": (new, family.params(family.length + 5, ignore_eos=True, seed=3)),
            "victim": (victim, family.params(3 * family.length, ignore_eos=True, seed=5)),
        }
        for _, params in asked.values():
            params.temperature = temperature
        alone = {name: running.generate([p], [q])[0][0] for name, (p, q) in asked.items()}
        return cls(family, running, asked, alone, asynchronous)

    def hurried(self) -> World:
        """The victim has finished each canvas in one step, and waits for the others' many."""
        prompt, params = self.asked["victim"]
        quick = self.family.params(params.max_tokens, "quick", ignore_eos=True, seed=params.seed)
        quick.temperature = params.temperature
        alone = self.running.generate([prompt], [quick])[0][0]
        return replace(
            self,
            asked=self.asked | {"victim": (prompt, quick)},
            alone=self.alone | {"victim": alone},
        )

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
        """Step on until the victim is in this phase.

        Beside those of `CANVAS_PHASES`: ``waiting``, ``mid-prefill``; ``late-N``, when the canvas
        of this number has no mask left but goes on or waits; ``draft-N`` and ``verify-N``, when
        that is the next pass and N tokens have been put out.
        """
        if phase == "waiting":
            assert driver.slot("victim") is None
            return
        name, _, number = phase.rpartition("-")
        if phase == "mid-prefill":
            driver.until(lambda: 0 < self._computed(driver) < len(self.asked["victim"][0]))
        elif name == "late":
            driver.until(lambda: self._is_late(driver, int(number)))
        elif name in ("draft", "verify"):
            kind = Phase.DENOISE if name == "draft" else Phase.COMMIT
            driver.until(lambda: self._passes(driver, kind, int(number)))
        else:
            driver.until(lambda: self._is_in(driver, *CANVAS_PHASES[phase]))
        assert len(self.running.core.batch_queue or ()) == self.asynchronous
        if phase == "commit-in-flight":
            emitted = driver.request("victim").num_output_tokens
            assert (emitted == 0) == self.asynchronous

    @staticmethod
    def _computed(driver: Driver) -> int:
        computed: int = driver.request("victim").num_computed_tokens
        return computed

    @property
    def _base(self) -> int:
        """Where the victim's first canvas begins."""
        prompt = self.asked["victim"][0]
        return len(prompt) - self.family.tail(prompt)

    def _is_in(self, driver: Driver, n: int, kind: Phase, step: int | None) -> bool:
        found = driver.canvas("victim")
        return (
            found is not None
            and found[:2] == (kind, self._base + n * self.family.length)
            and step in (None, found[2])
            and self._computed(driver) >= self._base
        )

    def _is_late(self, driver: Driver, n: int) -> bool:
        slot, slots = driver.slot("victim"), self.running.slots
        start = self._base + n * self.family.length
        if slot is None or driver.canvas("victim")[:2] != (Phase.DENOISE, start):
            return False
        joint = slots.algorithms.by_name.get("JointThreshold")
        if joint is None:
            return bool(slots.ready[slot] > 0)
        return bool(
            joint.state["post_edit_steps"][slot] > 0
        )  # it has edited, and is not at its end

    def _passes(self, driver: Driver, kind: Phase, tokens: int) -> bool:
        found, request = driver.canvas("victim"), driver.request("victim")
        return found is not None and found[0] == kind and request.num_output_tokens >= tokens


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
