"""Golden cases through the real engine, token for token, however they are scheduled."""

from __future__ import annotations

from itertools import product, zip_longest
from typing import Any

import pytest

from tests.support import oracle
from tests.support.engine import Engine, count_calls, engine, greedy
from vllm_dllm.engine.slots import Phase

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


OPTIONS = {
    "LowConfidence": ("threshold",),
    "JointThreshold": ("threshold", "edit_threshold", "max_post_edit_steps", "penalty_lambda"),
}
NAMES = {"low_confidence": "LowConfidence", "joint_threshold": "JointThreshold"}


def submit(running: Engine, golden: Any, cases: list[Any]) -> list[tuple[list[int], str]]:
    prompts = [golden.prompts[case.prompt].tokens for case in cases]
    params = []
    for case in cases:
        algorithm = NAMES[case.params["algorithm"]]
        given = (name for name in OPTIONS[algorithm] if name in case.params)
        options = {f"diffusion_{name}": case.params[name] for name in given}
        params.append(
            greedy(
                case.params["max_new_tokens"],
                ignore_eos=case.params["ignore_eos"],
                diffusion_algorithm=algorithm,
                **options,
            )
        )
    return running.generate(prompts, params)


def expected(cases: list[Any]) -> list[tuple[list[int], str]]:
    return [(list(case.output), case.finish_reason) for case in cases]


def load(name: str) -> tuple[Any, list[Any]]:
    """The cases of both algorithms, mixed, so that every batch has both."""
    golden = oracle.checkpoint(name)
    by_algorithm = [oracle.robust_primary(golden, algorithm) for algorithm in NAMES]
    assert all(len(cases) >= 20 for cases in by_algorithm)
    cases = [case for pair in zip_longest(*by_algorithm) for case in pair if case is not None]
    penalised = [c for c in golden.cases if c.kind == "secondary_penalty" and c.robust]
    assert penalised
    return golden, penalised + cases


def each(*others: Any, quick: set[tuple[Any, ...]]) -> list[Any]:
    """Every checkpoint with each of these; those that are not quick repeat a property."""
    cases = product(CHECKPOINTS, *others)
    return [pytest.param(*c, marks=() if c in quick else pytest.mark.long) for c in cases]


# Each schedule with one checkpoint; chunks of one and a half blocks are like those of 1.25.
QUICK_SCHEDULES = {
    ("ckpt_a_b32", "sync"),
    ("ckpt_b_b8", "async"),
    ("ckpt_b_b8", "budget-40"),
    ("ckpt_b_b8", "budget-64-async"),
    ("ckpt_b_b8", "no-prefix-cache"),
}


@pytest.mark.parametrize(("name", "schedule"), each(SCHEDULES, quick=QUICK_SCHEDULES))
def test_one_batch(name: str, schedule: str) -> None:
    golden, cases = load(name)
    if schedule not in ("sync", "async"):
        cases = cases[::3]  # algorithms alternate: still both
    with engine(golden.path, golden.block_size, **SCHEDULES[schedule]) as running:
        assert submit(running, golden, cases) == expected(cases)
        # Again: with prefix caching on, prompts now come out of the cache.
        assert submit(running, golden, cases) == expected(cases)
        running.assert_idle()


@pytest.mark.parametrize("name", each(quick={("ckpt_b_b8",)}))
def test_alone(name: str) -> None:
    golden, cases = load(name)
    with engine(golden.path, golden.block_size) as running:
        for case in cases[1::3]:  # others are alone in `test_every_canvas`
            assert submit(running, golden, [case]) == expected([case]), case.id
        running.assert_idle()


@pytest.mark.parametrize(
    ("name", "asynchronous"),
    each([False, True], quick={("ckpt_b_b8", True), ("ckpt_b_b8", False)}),
)
def test_preempted(name: str, asynchronous: bool) -> None:
    """A preempted request comes back with its output as prompt, on a block boundary."""
    golden, cases = load(name)
    options = SMALL_POOL | {"async_scheduling": asynchronous, "max_model_len": 256}
    with engine(golden.path, golden.block_size, **options) as running:
        preemptions = count_calls(running.scheduler, "_preempt_request")
        assert submit(running, golden, cases) == expected(cases)
        assert len(preemptions) >= 4
        running.assert_idle()


# What changes the number of forward passes, and must not change anything else.
POLICIES: dict[str, dict[str, Any]] = {
    "plain": {"eos_early_stop": False, "skip_last_commit": False},
    "early": {"fused_commit": False},
    "fused": {"eos_early_stop": False},
    "sync": {"execution": "sync", "eos_early_stop": False},
}


QUICK_POLICIES = {("ckpt_a_b32", "plain"), ("ckpt_a_b32", "sync"), ("ckpt_b_b8", "fused")}


@pytest.mark.parametrize(("name", "policy"), each(POLICIES, quick=QUICK_POLICIES))
def test_every_canvas(name: str, policy: str) -> None:
    """Not only the output: each intermediate canvas, hence also the number of steps."""
    golden, cases = load(name)
    settings = {"dllm": POLICIES[policy]}
    with engine(golden.path, golden.block_size, additional_config=settings) as running:
        canvases = record_canvases(running)
        for case in cases[::3]:
            canvases.clear()
            assert submit(running, golden, [case]) == expected([case])
            wanted = [step["canvas"] for block in case.blocks for step in block["steps"]]
            if policy == "early":
                # Fewer steps, and only in the last block.
                assert canvases == wanted[: len(canvases)], case.id
            else:
                assert canvases == wanted, case.id


@pytest.mark.parametrize(
    ("name", "policy"),
    each(
        ["plain", "sync", "fused"],
        quick={("ckpt_b_b8", "plain"), ("ckpt_a_b32", "sync"), ("ckpt_b_b8", "fused")},
    ),
)
def test_every_canvas_of_a_mixed_batch(name: str, policy: str) -> None:
    """Sixteen at once, of both algorithms: each goes through the canvases it has alone."""
    golden, cases = load(name)
    cases = cases[:: len(cases) // 15 | 1][:16]  # an odd stride: algorithms alternate
    assert len({case.params["algorithm"] for case in cases}) == 2
    settings = {"dllm": POLICIES[policy]}
    with engine(golden.path, golden.block_size, additional_config=settings) as running:
        canvases: dict[int, list[list[int]]] = {}
        decoder = running.runner.sampler.canvas_update
        decide = decoder.decide

        def recorded(plan: Any, *rest: Any) -> Any:
            outcome = decide(plan, *rest)
            changed = (outcome.canvas.tokens != plan.status.canvas.tokens).any(1)
            changed &= plan.status.phase != Phase.COMMIT
            for n in changed.nonzero()[:, 0].tolist():
                slot = int(plan.on_host[n])
                canvases.setdefault(slot, []).append(outcome.canvas.tokens[n].tolist())
            return outcome

        decoder.decide = recorded
        assert submit(running, golden, cases) == expected(cases)
    wanted = [[step["canvas"] for b in case.blocks for step in b["steps"]] for case in cases]
    assert sorted(canvases.values()) == sorted(wanted)


@pytest.mark.parametrize("name", each(quick={("ckpt_a_b32",)}))
def test_lockstep_batch(name: str) -> None:
    """Execution mode sync: finished canvases wait for the others, and nothing else changes."""
    golden, cases = load(name)
    settings = {"dllm": {"execution": "sync"}}
    with engine(golden.path, golden.block_size, additional_config=settings) as running:
        assert submit(running, golden, cases) == expected(cases)
        running.assert_idle()


def record_canvases(running: Engine) -> list[list[int]]:
    """The only request's canvas after each denoise step that changed it."""
    canvases: list[list[int]] = []
    decoder = running.runner.sampler.canvas_update
    decide = decoder.decide

    def recorded(plan: Any, *rest: Any) -> Any:
        outcome = decide(plan, *rest)
        commits = plan.status.phase.item() == Phase.COMMIT
        if not commits and not outcome.canvas.tokens.equal(plan.status.canvas.tokens):
            canvases.append(outcome.canvas.tokens[0].tolist())
        return outcome

    decoder.decide = recorded
    return canvases
