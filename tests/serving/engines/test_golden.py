"""Golden cases through the real engine, token for token, however they are scheduled."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product, zip_longest
from typing import Any

import pytest
import torch
from vllm_cpu_v2 import norms

from tests.support import oracle
from tests.support.engine import Engine, count_calls, engine, greedy
from tests.support.families import AHEAD, FUSED, SYNC, dllm
from tests.support.long import long_but
from vllm_dllm.engine.slots import Phase

pytestmark = pytest.mark.engine

CHECKPOINTS = ("ckpt_a_b32", "ckpt_b_b8")
# So few KV blocks that running requests take them from each other.
FEW: dict[str, Any] = {"block_size": 32, "num_gpu_blocks_override": 16, "max_model_len": 256}
# Ways to schedule the same requests; none may change a token.
SCHEDULES: dict[str, dict[str, Any]] = {
    "waits": {},
    "ahead": AHEAD,
    "budget-40": {"max_num_batched_tokens": 40},
    "budget-48": {"max_num_batched_tokens": 48},
    "budget-64, ahead": AHEAD | {"max_num_batched_tokens": 64},
    "budget-2048": {"max_num_batched_tokens": 2048},
    "not cached": {"enable_prefix_caching": False},
    "preempted": FEW,
    "preempted, ahead": FEW | AHEAD,
    "sync": SYNC,
    # Every step reads the block before a canvas, too.
    "two blocks": FUSED,
    "two blocks, budget-64": FUSED | {"max_num_batched_tokens": 64},
    "two blocks, preempted": FUSED | FEW,
    "two blocks, sync": AHEAD | dllm(fused_commit="on", execution="sync"),
}
# Each schedule with one checkpoint; chunks of one and a half blocks are like those of 1.25.
QUICK_SCHEDULES = {
    *(("ckpt_a_b32", name) for name in ("waits", "sync")),
    *(("ckpt_b_b8", name) for name in ("ahead", "budget-40", "budget-64, ahead", "not cached")),
    *(("ckpt_b_b8", name) for name in ("preempted", "preempted, ahead")),
    *(("ckpt_b_b8", name) for name in ("two blocks, budget-64", "two blocks, preempted")),
}
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


@pytest.mark.parametrize(
    ("name", "schedule"), long_but(QUICK_SCHEDULES, product(CHECKPOINTS, SCHEDULES))
)
def test_one_batch(name: str, schedule: str) -> None:
    """A preempted request comes back with its output as prompt, on a block boundary."""
    golden, cases = load(name)
    if "budget" in schedule or schedule in ("not cached", "two blocks, sync"):
        cases = cases[::3]  # algorithms alternate: still both
    with engine(golden.path, golden.block_size, **SCHEDULES[schedule]) as running:
        assert (running.runner.model_state.parts.window is not None) == ("two" in schedule)
        preempted = count_calls(running.scheduler, "_preempt_request")
        for _ in range(2):  # the second time prompts come out of the cache
            assert submit(running, golden, cases) == expected(cases)
        assert (len(preempted) >= 4) == ("preempted" in schedule)
        running.assert_idle()


# What changes the number of forward passes, and must not change anything else.
POLICIES: dict[str, dict[str, Any]] = {
    "plain": {"eos_early_stop": False, "skip_last_commit": False},
    "early": {"fused_commit": False},
    "fused": {"eos_early_stop": False},
    "sync": {"execution": "sync", "eos_early_stop": False},
}


QUICK_POLICIES = {("ckpt_a_b32", "plain"), ("ckpt_a_b32", "sync"), ("ckpt_b_b8", "fused")}


def record(running: Engine, keep: Callable[[int, list[int]], None]) -> None:
    """Keep each (slot, canvas) after each denoise step that changed it."""
    decoder = running.runner.sampler.canvas_update
    decide = decoder.decide

    def recorded(plan: Any, *rest: Any) -> Any:
        outcome = decide(plan, *rest)
        changed = (outcome.canvas.tokens != plan.status.canvas.tokens).any(1)
        changed &= plan.status.phase != Phase.COMMIT
        for n in changed.nonzero()[:, 0].tolist():
            keep(int(plan.on_host[n]), outcome.canvas.tokens[n].tolist())
        return outcome

    decoder.decide = recorded


def canvases_of(case: Any) -> list[list[int]]:
    return [step["canvas"] for block in case.blocks for step in block["steps"]]


@pytest.mark.parametrize(
    ("name", "policy"), long_but(QUICK_POLICIES, product(CHECKPOINTS, POLICIES))
)
def test_every_canvas(name: str, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only the output: each intermediate canvas, hence also the number of steps.

    Alone, and sixteen of both algorithms at once. The engine takes the norms of vllm-cpu-v2.
    """
    taken: list[bool] = []
    supports = norms._supports
    monkeypatch.setattr(norms, "_supports", lambda *a: taken.append(supports(*a)) or taken[-1])
    golden, cases = load(name)
    together = cases[:: len(cases) // 15 | 1][:16]  # an odd stride: algorithms alternate
    assert len({case.params["algorithm"] for case in together}) == 2
    with engine(golden.path, golden.block_size, **dllm(**POLICIES[policy])) as running:
        by_slot: dict[int, list[list[int]]] = {}
        record(running, lambda slot, canvas: by_slot.setdefault(slot, []).append(canvas))
        taken.clear()
        for case in cases[::3]:
            by_slot.clear()
            assert submit(running, golden, [case]) == expected([case])
            (canvases,), wanted = by_slot.values(), canvases_of(case)
            # An early end saves steps of the last block.
            assert canvases == (wanted[: len(canvases)] if policy == "early" else wanted), case.id
        by_slot.clear()
        assert submit(running, golden, together) == expected(together)
    if policy != "early":
        assert sorted(by_slot.values()) == sorted(map(canvases_of, together))
    assert taken and all(taken)


# Golden values are rounded to 5 decimals and were seen to differ by up to 6.5e-5 between
# two float32 implementations.
TOLERANCE = 2e-4


@pytest.mark.parametrize("budget", [None, 40])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits(name: str, budget: int | None) -> None:
    """Those of each prompt's last chunk and of the first canvas, with prompts in chunks or not."""
    golden = oracle.checkpoint(name)
    options = {"enable_prefix_caching": False, "max_num_batched_tokens": budget}
    passes: list[tuple[list[int], torch.Tensor]] = []

    def record_pass(model: Any, args: Any, kwargs: Any, hidden: torch.Tensor) -> None:
        passes.append((kwargs["positions"].tolist(), model.head(hidden).float()))

    worst = 0.0
    with engine(golden.path, golden.block_size, **options) as running:
        running.runner.model.register_forward_hook(record_pass, with_kwargs=True)
        for prompt in golden.prompts.values():
            passes.clear()
            running.generate([prompt.tokens], [greedy(1)])
            chunks = sum(positions[-1] < len(prompt.tokens) for positions, _ in passes)
            for kind, of_pass in (("prompt_only", chunks - 1), ("first_generation_canvas", chunks)):
                positions, logits = passes[of_pass]
                wanted = prompt.logits[kind]
                rows = [positions.index(row) for row in wanted["rows"]]
                error = logits[rows] - torch.tensor(wanted["values"])
                worst = max(worst, error.abs().max().item())
    assert 0 < worst <= TOLERANCE
