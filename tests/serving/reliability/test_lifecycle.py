"""What may happen to a request, in every phase of its life: nobody else notices.

A victim runs beside two others that occupy the rest of the engine. An event hits it in a known
phase; then the others' tokens are what they are alone, KV blocks and slots have come back, and
a newcomer that gets the victim's slot is exact.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.support import drive, oracle
from tests.support.drive import TWO_BLOCKS, Driver, Family, assert_nothing_held, replaced
from tests.support.lifecycle import (
    CANVAS_PHASES,
    EVENTS,
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

    Attributes:
        family: from a folder for the checkpoint.
        asked: options of requests in place of the family's slow ones.
        hurried: the victim alone is quick, and waits for the others.
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
    # A finished canvas waits for the others of its batch.
    "lockstep-async": Way(llada2, AHEAD | LOCKSTEP, LATE, FEW_LAST, hurried=True),
    "lockstep": Way(llada2, BEHIND | LOCKSTEP, LATE, FEW_LAST, hurried=True),
    "lockstep-two-blocks": Way(llada2, TOGETHER, LATE, FEW_LAST, hurried=True),
    "lockstep-gemma-async": Way(
        drive.gemma, AHEAD | LOCKSTEP, LATE, FEW_LAST, hurried=True, temperature=1.5
    ),
    # Canvases are drafted, then verified by a causal pass of which part may be rejected. Greedy
    # answers have too few different tokens for a stop token in the second canvas.
    "verifying-async": Way(drive.nemotron, AHEAD, PASSES, FEW_LAST, LINEAR_SPEC),
    "verifying-sync": Way(drive.nemotron, BEHIND, PASSES, FEW_LAST, LINEAR_SPEC),
    "nemotron-sync": Way(drive.nemotron, BEHIND, USUAL[1:], temperature=1.0),
    "nemotron-async": Way(drive.nemotron, AHEAD, USUAL[1:], temperature=1.0),
    "diffcoder-sync": Way(drive.diffcoder, BEHIND | SEPARATE, USUAL[1:]),
    "diffcoder-async": Way(drive.diffcoder, AHEAD | SEPARATE, USUAL[1:]),
    "diffcoder-granted": Way(drive.diffcoder, AHEAD, USUAL[1:]),
    "diffcoder-two-blocks": Way(drive.diffcoder, TWO_BLOCKS, USUAL[1:]),
    "fast-dllm-sync": Way(drive.fast_dllm, BEHIND, SHIFTED, ()),
    "fast-dllm-async": Way(drive.fast_dllm, AHEAD, SHIFTED, ()),
    "fast-dllm-streams": Way(
        drive.fast_dllm, AHEAD, SHIFTED, (), asked={"diffusion_stream_prefix": True}
    ),
    # The state of an edited canvas is not inherited.
    "llada2.2-async": Way(
        drive.llada22, AHEAD, ("mid-prefill", "denoise-2", "converged", "second-canvas"), FEW_LAST
    ),
}
QUICK = ("llada2-async", "llada2-two-blocks", "edits-async", "lockstep-async", "verifying-async")


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
    with replaced(decoder, "policy", policy):
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
