"""`test_lifecycle.py` with canvases that begin right after the prompt, and canvases that verify.

LinearSpec's canvases are drafted, then verified by a causal pass of which part may be rejected.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.support.drive import Driver, nemotron
from tests.support.lifecycle import (
    ACTIONS,
    BUDGET,
    PHASES,
    World,
    assert_end,
    assert_unnoticed,
    ends,
)
from vllm_dllm.engine.slots import Phase

pytestmark = [pytest.mark.engine, pytest.mark.slow]

LINEAR_SPEC = {"diffusion_algorithm": "LinearSpec"}
WAYS = ("sync", "async")
LATE = [pytest.param(way, marks=() if way == "async" else pytest.mark.long) for way in WAYS]


def started(tmp_path_factory: Any, way: str, asked: dict[str, Any] | None) -> Iterator[World]:
    family = nemotron(tmp_path_factory.mktemp("nemotron") / "model")
    if asked:
        family = replace(family, slow=asked)
    asynchronous = way == "async"
    options = {"max_num_batched_tokens": BUDGET["nemotron"], "async_scheduling": asynchronous}
    with family.start(max_num_seqs=3, **options) as running:
        # Greedy answers have too few different tokens for a stop token in the second canvas.
        yield World.make(family, running, asynchronous, temperature=0.0 if asked else 1.0)


@pytest.fixture(scope="module", params=[pytest.param(w, marks=pytest.mark.long) for w in WAYS])
def denoising(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[World]:
    yield from started(tmp_path_factory, request.param, None)


@pytest.fixture(scope="module", params=LATE)
def verifying(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[World]:
    yield from started(tmp_path_factory, request.param, LINEAR_SPEC)


@pytest.mark.parametrize("event", ACTIONS)
@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase != "waiting"])
def test_event(denoising: World, phase: str, event: str) -> None:
    driver = denoising.begin()
    denoising.reach(driver, phase)
    assert_unnoticed(denoising, driver, event)


@pytest.mark.parametrize(
    "name",
    ["one-token", "first-canvas", "one-after", "two-canvases", "stop-token", "late-stop-token"],
)
def test_end(denoising: World, name: str) -> None:
    options, tokens, reason = ends(denoising)[name]
    assert_end(denoising, options, denoising.alone["victim"][:tokens], reason)


def reach_pass(world: World, driver: Driver, phase: Phase, tokens: int) -> None:
    """Until the victim has output some tokens, and the next pass over its canvas is this one."""

    def reached() -> bool:
        found, request = driver.canvas("victim"), driver.request("victim")
        return found is not None and found[0] == phase and request.num_output_tokens >= tokens

    driver.until(reached)


@pytest.mark.parametrize("event", ACTIONS)
@pytest.mark.parametrize("tokens", [0, 1, 12])
@pytest.mark.parametrize("phase", [Phase.DENOISE, Phase.COMMIT], ids=["draft", "verify"])
def test_event_around_a_verifying_pass(
    verifying: World, phase: Phase, tokens: int, event: str
) -> None:
    """A draft that is not verified leaves nothing behind, and a rejected token never comes back."""
    driver = verifying.begin()
    reach_pass(verifying, driver, phase, tokens)
    assert_unnoticed(verifying, driver, event)


@pytest.mark.parametrize("event", ACTIONS)
def test_event_in_a_prompt(verifying: World, event: str) -> None:
    driver = verifying.begin()
    verifying.reach(driver, "mid-prefill")
    assert_unnoticed(verifying, driver, event)


@pytest.mark.parametrize("name", ["one-token", "first-canvas", "stop-token", "late-stop-token"])
def test_end_within_a_draft(verifying: World, name: str) -> None:
    options, tokens, reason = ends(verifying)[name]
    assert_end(verifying, options, verifying.alone["victim"][:tokens], reason)
