"""What may happen to a request, in every phase of its life: nobody else notices.

A victim runs beside two others that occupy the rest of the engine. An event hits it in a known
phase; then the others' tokens are what they are alone, KV blocks and slots have come back, and
a newcomer that gets the victim's slot is exact.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.support import drive, oracle
from tests.support.drive import TWO_BLOCKS, Driver, Family, assert_nothing_held
from tests.support.engine import Engine, count_calls
from vllm_dllm.engine.slots import Phase

pytestmark = [pytest.mark.engine, pytest.mark.slow]

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
    # Of a shifted model: the end of a prompt is read again for its boundary token.
    "prompt-again": (-1, Phase.COMMIT, None),
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

        Beside those of `CANVAS_PHASES`: ``waiting``, ``mid-prefill``; ``late-N``, when canvas N has
        no mask left but goes on; ``draft-N`` and ``verify-N``, the next pass after N tokens.
        """
        if phase == "waiting":
            assert driver.slot("victim") is None
            return
        name, _, number = phase.rpartition("-")
        if phase == "mid-prefill":
            driver.until(
                lambda: (
                    0 < driver.request("victim").num_computed_tokens < len(self.asked["victim"][0])
                )
            )
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

    @property
    def _base(self) -> int:
        """Where the victim's first canvas begins."""
        prompt = self.asked["victim"][0]
        return len(prompt) - self.family.tail(prompt)

    def _is_in(self, driver: Driver, n: int, kind: Phase, step: int | None) -> bool:
        found = driver.canvas("victim")
        # Of a prompt that canvases follow wherever it ends, only the last token is read again.
        back = 1 if n < 0 and not self.family.aligned else -n * self.family.length
        return (
            found is not None
            and found[:2] == (kind, self._base - back)
            and step in (None, found[2])
            and driver.request("victim").num_computed_tokens >= self._base
        )

    def _is_late(self, driver: Driver, n: int) -> bool:
        slot, slots = driver.slot("victim"), self.running.slots
        start = self._base + n * self.family.length
        if slot is None or driver.canvas("victim")[:2] != (Phase.DENOISE, start):
            return False
        joint = slots.algorithms.by_name.get("JointThreshold")
        if joint is None:
            return bool(slots.ready[slot] > 0)
        return bool(slots.step[slot] > 0 and joint.state["post_edit_steps"][slot] > 0)

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

    with mock.patch.object(manager, "allocate_slots", none_left):
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


EVENTS: dict[str, Callable[[World, Driver], None]] = {
    "abort": abort,
    "preempt": preempt,
    "reset": reset,
    "abort-while-preempted": abort_while_preempted,
}


def assert_unnoticed(world: World, driver: Driver, event: str) -> None:
    """The event hits the victim now; nobody else's tokens change, nor its own but by an abort."""
    slot = driver.slot("victim")
    EVENTS[event](world, driver)
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


JOINT = {
    "diffusion_algorithm": "JointThreshold",
    "diffusion_threshold": 2.0,
    "diffusion_edit_threshold": 0.0,
    "diffusion_max_post_edit_steps": 2,  # so few that one who inherits a count shows it
}
STREAMED = {
    "diffusion_algorithm": "Credit",
    "diffusion_threshold": 2.0,
    "diffusion_stream_prefix": True,
}
LINEAR_SPEC = {"diffusion_algorithm": "LinearSpec"}
AHEAD, BEHIND = {"async_scheduling": True}, {"async_scheduling": False}
LOCKSTEP = {"additional_config": {"dllm": {"execution": "sync"}}}
SEPARATE = {"additional_config": {"dllm": {"fused_commit": "off"}}}
# Three windows of two blocks, and a chunk that is shorter than the victim.
WIDER = TWO_BLOCKS | {"max_num_batched_tokens": 64}
TOGETHER = WIDER | {"additional_config": {"dllm": {"execution": "sync", "fused_commit": "on"}}}
USUAL = ("waiting", "mid-prefill", *(phase for phase in CANVAS_PHASES if phase != "prompt-again"))
LATE = ("late-0", "late-2")
PASSES = ("mid-prefill", *(f"{kind}-{n}" for kind in ("draft", "verify") for n in (0, 1, 12)))
SHIFTED = ("mid-prefill", "prompt-again", "denoise-2", "second-canvas")
LAST = ("one-token", "first-canvas", "one-after", "two-canvases", "stop-token", "late-stop-token")
FEW_LAST = ("one-token", "first-canvas", "one-after", "late-stop-token")


@dataclass(frozen=True)
class Way:
    """An engine of three seats, what its requests ask for, and what happens to one of them.

    With `hurried` the victim alone is quick, and waits for the others.
    """

    family: Callable[[Path], Family]
    options: dict[str, Any]
    phases: tuple[str, ...] = USUAL
    lasts: tuple[str, ...] = LAST
    asked: dict[str, Any] = field(default_factory=dict)
    hurried: bool = False
    temperature: float = 0.0


def llada2(path: Path) -> Family:
    return drive.llada2()


# DiffusionGemma's canvases would settle to the same in any step if they were not hot.
WAYS: dict[str, Way] = {
    "llada2-async": Way(llada2, AHEAD),
    "llada2-two-blocks": Way(llada2, WIDER),
    "llada2-sync": Way(llada2, BEHIND),
    "gemma-sync": Way(drive.gemma, BEHIND, temperature=1.5),
    "gemma-async": Way(drive.gemma, AHEAD, temperature=1.5),
    # JointThreshold goes on with a canvas that has no masks left, and counts those steps.
    "edits-async": Way(llada2, AHEAD, LATE, FEW_LAST, JOINT),
    "edits-two-blocks": Way(llada2, WIDER, LATE, FEW_LAST, JOINT),
    # What has left of a canvas stays, and the credit of its tokens is not begun anew.
    "llada2-streams": Way(llada2, WIDER, ("denoise-2", "second-canvas"), (), STREAMED),
    # A finished canvas waits for the others of its batch.
    "lockstep-async": Way(llada2, AHEAD | LOCKSTEP, LATE, FEW_LAST, hurried=True),
    "lockstep-two-blocks": Way(llada2, TOGETHER, LATE, FEW_LAST, hurried=True),
    "lockstep-gemma-async": Way(
        drive.gemma, AHEAD | LOCKSTEP, LATE, FEW_LAST, hurried=True, temperature=1.5
    ),
    # Canvases are drafted, then verified by a causal pass of which part may be rejected. Greedy
    # answers have too few different tokens for a stop token in the second canvas.
    "verifying-async": Way(drive.nemotron, AHEAD, PASSES, FEW_LAST, LINEAR_SPEC),
    "verifying-sync": Way(drive.nemotron, BEHIND, PASSES, FEW_LAST, LINEAR_SPEC),
    "nemotron-async": Way(drive.nemotron, AHEAD, USUAL[1:], temperature=1.0),
    "diffcoder-async": Way(drive.diffcoder, AHEAD | SEPARATE, USUAL[1:]),
    "diffcoder-granted": Way(drive.diffcoder, AHEAD, USUAL[1:]),
    "diffcoder-two-blocks": Way(drive.diffcoder, TWO_BLOCKS, USUAL[1:]),
    "fast-dllm-async": Way(drive.fast_dllm, AHEAD, SHIFTED, ()),
    "fast-dllm-streams": Way(
        drive.fast_dllm, AHEAD, SHIFTED, (), asked={"diffusion_stream_prefix": True}
    ),
    "openpangu-async": Way(drive.openpangu, AHEAD, SHIFTED, ()),
    # The state of an edited canvas is not inherited.
    "llada2.2-async": Way(
        drive.llada22, AHEAD, ("mid-prefill", "denoise-2", "converged", "second-canvas"), FEW_LAST
    ),
}
QUICK = ("llada2-async", "llada2-two-blocks", "edits-async", "llada2-streams", "lockstep-async")
QUICK += ("verifying-async",)


def each(cases: Callable[[Way], list[tuple[Any, ...]]]) -> list[Any]:
    """The cases of every way; those of the ways that are not quick are long."""
    return [
        pytest.param(name, *case, marks=() if name in QUICK else pytest.mark.long)
        for name, way in WAYS.items()
        for case in cases(way)
    ]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], World]]:
    """The world of each way, which is begun once: engines live beside each other, and end at once,
    because vLLM's groups of processes end with the first of them."""
    begun: dict[str, World] = {}
    with contextlib.ExitStack() as engines:

        def world(name: str) -> World:
            if name in begun:
                return begun[name]
            way = WAYS[name]
            family = way.family(tmp_path_factory.mktemp("lifecycle") / "model")
            family = replace(family, slow=way.asked or family.slow)
            budget = {"max_num_seqs": 3, "max_num_batched_tokens": family.budget}
            running = engines.enter_context(family.start(**(budget | way.options)))
            ahead = way.options["async_scheduling"]
            made = World.make(family, running, ahead, way.temperature)
            begun[name] = made.hurried() if way.hurried else made
            return begun[name]

        yield world


@pytest.fixture
def world(request: pytest.FixtureRequest, worlds: Callable[[str], World]) -> World:
    return worlds(request.param)


def events(way: Way) -> list[tuple[str, str]]:
    # Who waits has nothing that could be taken from him.
    return [
        (phase, event)
        for phase in way.phases
        for event in EVENTS
        if phase != "waiting" or event in ("abort", "reset")
    ]


@pytest.mark.parametrize(("world", "phase", "event"), each(events), indirect=["world"])
def test_event_in_phase(world: World, phase: str, event: str) -> None:
    """Catches a newcomer that inherits a canvas, a count of edits or the wish to leave, a canvas
    that is denoised again, and a rejected token that comes back."""
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


def both_lasts(way: Way) -> list[tuple[str, bool]]:
    commits = (False, True) if way.phases == USUAL else (False,)
    return [(name, last) for name in way.lasts for last in commits]


@pytest.mark.parametrize(("world", "name", "last_commit"), each(both_lasts), indirect=["world"])
def test_end(world: World, name: str, last_commit: bool) -> None:
    """A request ends while denoised (its last canvas leaves early), or with a commit."""
    options, tokens, reason = ends(world)[name]
    decoder = world.running.runner.sampler.canvas_update
    policy = decoder.policy
    if last_commit:
        policy = replace(policy, early=False, skip_last_commit=False, fused=False, granted=False)
    with mock.patch.object(decoder, "policy", policy):
        assert_end(world, options, world.alone["victim"][:tokens], reason)


def only(chosen: Callable[[Way], bool]) -> list[Any]:
    return each(lambda way: [()] if chosen(way) else [])


@pytest.mark.parametrize("world", only(lambda way: way.phases == LATE), indirect=True)
def test_the_others_leave(world: World) -> None:
    """Whom the victim waits for is gone: it must go on, alone, as if nobody had been there."""
    driver = world.begin()
    world.reach(driver, "late-0")
    world.running.llm.llm_engine.abort_request(["near", "far"])
    assert driver.finish()["victim"] == world.alone["victim"]
    assert_nothing_held(world.running)


@pytest.mark.parametrize("world", only(lambda way: way.phases == USUAL), indirect=True)
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


@pytest.mark.parametrize("world", only(lambda way: way.phases == USUAL), indirect=True)
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
