"""Golden cases through the real engine, token for token, however they are scheduled."""

from __future__ import annotations

from typing import Any

import pytest

from tests import oracle
from tests.engine.harness import Engine, count_calls, engine, greedy

pytestmark = pytest.mark.engine

CHECKPOINTS = ("ckpt_a_b32", "ckpt_b_b8")
# Ways to schedule the same requests; none may change a token.
SCHEDULES: dict[str, dict[str, Any]] = {
    "sync": {},
    "async": {"async_scheduling": True},
    "budget-40": {"max_num_batched_tokens": 40},
    "budget-48": {"max_num_batched_tokens": 48},
    "budget-64-async": {"max_num_batched_tokens": 64, "async_scheduling": True},
    "budget-2048": {"max_num_batched_tokens": 2048},
    "no-prefix-cache": {"enable_prefix_caching": False},
}
# So few KV blocks that running requests take them from each other.
SMALL_POOL = {"block_size": 32, "num_gpu_blocks_override": 16}


def submit(running: Engine, golden: Any, cases: list[Any]) -> list[tuple[list[int], str]]:
    prompts = [golden.prompts[case.prompt].tokens for case in cases]
    params = [
        greedy(
            case.params["max_new_tokens"],
            ignore_eos=case.params["ignore_eos"],
            diffusion_threshold=case.params["threshold"],
        )
        for case in cases
    ]
    return running.generate(prompts, params)


def expected(cases: list[Any]) -> list[tuple[list[int], str]]:
    return [(list(case.output), case.finish_reason) for case in cases]


def load(name: str) -> tuple[Any, list[Any]]:
    golden = oracle.checkpoint(name)
    cases = oracle.robust_primary(golden, "low_confidence")
    assert len(cases) >= 40
    return golden, cases


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_one_batch(name: str, schedule: str) -> None:
    golden, cases = load(name)
    with engine(golden.path, golden.block_size, **SCHEDULES[schedule]) as running:
        assert submit(running, golden, cases) == expected(cases)
        # Again: with prefix caching on, prompts now come out of the cache.
        assert submit(running, golden, cases) == expected(cases)
        running.assert_idle()


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_alone(name: str) -> None:
    golden, cases = load(name)
    with engine(golden.path, golden.block_size) as running:
        for case in cases:
            assert submit(running, golden, [case]) == expected([case]), case.id
        running.assert_idle()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_preempted(name: str, asynchronous: bool) -> None:
    """A preempted request comes back with its output as prompt, on a block boundary."""
    golden, cases = load(name)
    options = SMALL_POOL | {"async_scheduling": asynchronous, "max_model_len": 256}
    with engine(golden.path, golden.block_size, **options) as running:
        preemptions = count_calls(running.scheduler, "_preempt_request")
        assert submit(running, golden, cases) == expected(cases)
        assert len(preemptions) >= 4
        running.assert_idle()


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_canvas(name: str, early: bool) -> None:
    """Not only the output: each intermediate canvas, hence also the number of steps."""
    golden, cases = load(name)
    settings = {"dllm": {"eos_early_stop": early}}
    with engine(golden.path, golden.block_size, additional_config=settings) as running:
        for case in cases[::3]:
            canvases = record_canvases(running)
            assert submit(running, golden, [case]) == expected([case])
            wanted = [step["canvas"] for block in case.blocks for step in block["steps"]]
            if early:
                # Fewer steps, and only in the block that holds the end token.
                assert canvases == wanted[: len(canvases)], case.id
            else:
                assert canvases == wanted, case.id


def record_canvases(running: Engine) -> list[list[int]]:
    """The canvas after each denoise step of the only request (commits are left out)."""
    canvases: list[list[int]] = []
    sampler = running.runner.sampler
    update = type(sampler)._update

    def recorded(hidden: Any, chosen: Any, output: Any) -> None:
        update(sampler, hidden, chosen, output)
        if output.num_rejected.item():
            canvases.append(running.slots.tokens[chosen.slot[0]].tolist())

    sampler._update = recorded
    return canvases
