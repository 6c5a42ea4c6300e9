"""Algorithms and execution modes in the engine: nothing that saves steps changes an answer."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from examples.tiny.tasks import held_out_set
from examples.tiny.tokens import llada2_tokenizer, sdar_tokenizer
from examples.tiny.training import Encoder
from tests.support.checkpoints import TINY_LLADA2, TINY_SDAR
from tests.support.engine import Engine, engine, greedy
from tests.support.families import dllm
from vllm_dllm.decoding.registry import algorithm_names
from vllm_dllm.settings.server import ThresholdUnderLoad
from vllm_dllm.tracing.trace import Trace

pytestmark = pytest.mark.engine

NAMES = algorithm_names("mask", of_every_model=True)
STREAMABLE = [name for name in NAMES if not name.startswith("JointThreshold")]
# Ways to save forward passes; none may change a token.
POLICIES: dict[str, dict[str, Any]] = {
    "plain": {"eos_early_stop": False, "skip_last_commit": False},
    "early": {"eos_early_stop": True, "skip_last_commit": False},
    "no-last-commit": {"eos_early_stop": False, "fused_commit": False},
    "fused": {"eos_early_stop": False},
    "two blocks": {"eos_early_stop": False, "fused_commit": "on"},
    "sync": {"execution": "sync"},
}
MODELS = {"llada2": (TINY_LLADA2, 32), "sdar": (TINY_SDAR, 4)}
Answers = dict[str, list[tuple[list[int], str]]]


def prompts(model: str, count: int = 7) -> list[list[int]]:
    """A problem of each of the last tasks, whose answers are the longest."""
    encoder = Encoder(llada2_tokenizer() if model == "llada2" else sdar_tokenizer())
    return [encoder(problem).prompt for problem in held_out_set(1)[-count:]]


def ask(
    running: Engine, asked: list[list[int]], names: list[str], max_tokens: int, **options: Any
) -> Answers:
    """All prompts with each algorithm, together."""
    params = [
        greedy(max_tokens, diffusion_algorithm=name, logprobs=1, **options)
        for name in names
        for _ in asked
    ]
    got = running.generate(asked * len(names), params)
    return {name: got[n * len(asked) : (n + 1) * len(asked)] for n, name in enumerate(names)}


def steps(running: Engine) -> float:
    name = "vllm:diffusion_num_denoising_steps"
    return sum(metric.value for metric in running.llm.get_metrics() if metric.name == name)


@pytest.fixture(
    scope="module",
    params=[
        ("llada2", 2, ("plain", "early", "two blocks", "sync")),
        *(pytest.param((m, 7, tuple(POLICIES)), marks=pytest.mark.long) for m in MODELS),
    ],
    ids=lambda param: f"{param[0]}, {param[1]} prompts",
)
def outcomes(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """Under each policy: all algorithms alone and together, and the steps it took."""
    found: dict[str, dict[str, Any]] = {}
    model, count, policies = request.param
    (path, block), asked = MODELS[model], prompts(model, count)
    for policy in policies:
        settings = POLICIES[policy]
        options = dllm(**settings) | {"disable_log_stats": False}
        options["async_scheduling"] = policy == "two blocks"
        with engine(path, block, max_num_seqs=96, **options) as running:
            assert (running.runner.model_state.parts.window is None) == (policy != "two blocks")
            alone: Answers = {
                name: running.generate(asked[:1], [greedy(64, diffusion_algorithm=name)])
                for name in NAMES
            }
            before = steps(running)
            together = ask(running, asked, NAMES, 64)
            found[policy] = {
                "alone": alone,
                "together": together,
                "steps": steps(running) - before,
                "short": ask(running, asked, NAMES, 5),
                "streamed": ask(running, asked, STREAMABLE, 64, diffusion_stream_prefix=True),
            }
            running.assert_idle()
    return found


def test_nothing_changes_an_answer(outcomes: dict[str, dict[str, Any]]) -> None:
    """Neither a policy, nor other algorithms in the batch, `max_tokens`, or a streamed prefix."""
    plain = outcomes["plain"]
    for policy, outcome in outcomes.items():
        for kind in ("alone", "together", "short"):
            assert outcome[kind] == plain[kind], (policy, kind)
        for name in NAMES:
            assert outcome["together"][name][:1] == outcome["alone"][name], (policy, name)
        for name in STREAMABLE:
            assert outcome["streamed"][name] == plain["together"][name], (policy, name)
    for name in NAMES:
        for (tokens, reason), (longer, _) in zip(
            plain["short"][name], plain["together"][name], strict=True
        ):
            assert tokens == longer[:5]
            assert reason == ("stop" if tokens == longer else "length")


def test_less_work(outcomes: dict[str, dict[str, Any]]) -> None:
    """Proves that the short cuts were taken."""
    plain = outcomes["plain"]["steps"]
    assert outcomes["early"]["steps"] < plain
    if "fused" in outcomes:
        assert outcomes["fused"]["steps"] < outcomes["no-last-commit"]["steps"] <= plain
    assert outcomes["sync"]["steps"] > outcomes["early"]["steps"], "waiting costs passes"


# ---- A threshold that follows the load

RULE = {"from": 1.0, "to": 0.5, "at_requests": 4}
AT = ThresholdUnderLoad.parse(RULE).at
GAUGE = "vllm:diffusion_threshold_under_load"


def ask_traced(running: Engine, prompts: list[list[int]], own: list[float | None]) -> list[Trace]:
    """The traces of prompts that are asked together, some with a threshold of their own."""
    params = [
        greedy(64, diffusion_trace=True, **({} if it is None else {"diffusion_threshold": it}))
        for it in own
    ]
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = running.llm.generate(asked, params, use_tqdm=False)
    return [output.outputs[0].diffusion_trace for output in outputs]


def decided(trace: Trace) -> tuple[list[int], list[float]]:
    return trace.step_maps, trace.probabilities


def thresholds(trace: Trace) -> list[float | None]:
    return [each.threshold for block in trace.blocks for each in block.passes]


def check(trace: Trace, requests: Counter[int], ended: Counter[int]) -> None:
    """Each pass has the threshold of its step, and decides what is surer, or one position.

    `ended` counts the requests that had ended when a step ran that was scheduled before.
    """
    for block in trace.blocks:
        for each in block.passes:
            known = requests[each.engine_step]
            assert each.threshold == AT(known + ended[each.engine_step])
            events = [event for event in block.events if event.step == each.step]
            if each.kind == "denoise" and len(events) > 1:
                assert min(event.probability for event in events) > each.threshold


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"enforce_eager": False, "async_scheduling": True}, marks=pytest.mark.long),
        pytest.param({"additional_config": {"fused_commit": "on"}}, marks=pytest.mark.long),
    ],
    ids=["plain", "compiled and asynchronous", "fused"],
)
def test_thresholds_of_steps(options: dict[str, Any]) -> None:
    asked = prompts("llada2", 3)
    section = {"threshold_under_load": RULE, **options.pop("additional_config", {})}
    options["additional_config"] = {"dllm": section}
    with engine(TINY_LLADA2, 32, disable_log_stats=False, **options) as running:
        alone, careful, fast, own = (
            ask_traced(running, asked[:1], [it])[0] for it in (None, 1.0, 0.5, 0.8)
        )
        together = ask_traced(running, asked[:1] * 4, [None] * 4)
        mixed = ask_traced(running, asked[::-1], [None, None, 0.8])
        gauges = [each for each in running.llm.get_metrics() if each.name == GAUGE]
        assert [each.value for each in gauges] == [AT(0)]
    assert {*thresholds(alone)} == {1.0}
    assert decided(alone) == decided(careful) != decided(fast)
    for trace in together:  # all begin and end together
        assert {*thresholds(trace)} == {0.5}
        assert decided(trace) == decided(fast)
    assert {*thresholds(mixed[2])} == {*thresholds(own)} == {None}
    assert decided(mixed[2]) == decided(own)
    requests = Counter(
        each.engine_step for trace in mixed for block in trace.blocks for each in block.passes
    )
    ahead = options.get("async_scheduling", False)
    ended = Counter(trace.blocks[-1].passes[-1].engine_step + 1 for trace in mixed if ahead)
    for trace in mixed[:2]:
        check(trace, requests, ended)
    assert 0.666667 in {it for trace in mixed[:2] for it in thresholds(trace)}
