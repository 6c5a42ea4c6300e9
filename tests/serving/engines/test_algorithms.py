"""Algorithms and execution modes in the engine: nothing that saves steps changes an answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from examples.tiny.tasks import held_out_set
from examples.tiny.tokens import llada2_tokenizer, sdar_tokenizer
from examples.tiny.training import Encoder
from tests.support.checkpoints import TINY_LLADA2, TINY_SDAR
from tests.support.engine import Engine, engine, greedy
from vllm_dllm.decoding.names import algorithm_names
from vllm_dllm.engine.slots import AlgorithmSlots

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
        options = {"additional_config": {"dllm": settings}, "disable_log_stats": False}
        options["async_scheduling"] = policy == "two blocks"
        with engine(path, block, max_num_seqs=96, **options) as running:
            assert (running.runner.model_state.parts.window is None) == (policy != "two blocks")
            alone: Answers = {}
            one = asked[:1]
            for name in NAMES:
                params = greedy(64, diffusion_algorithm=name)
                alone[name] = [running.generate([prompt], [params])[0] for prompt in one]
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


def test_mixed_batches(outcomes: dict[str, dict[str, Any]]) -> None:
    """Requests with different algorithms share a batch."""
    for policy, outcome in outcomes.items():
        for name in NAMES:
            assert outcome["together"][name][:1] == outcome["alone"][name], (policy, name)


@pytest.mark.parametrize("kind", ["alone", "together", "short"])
def test_nothing_changes_an_answer(kind: str, outcomes: dict[str, dict[str, Any]]) -> None:
    for policy, outcome in outcomes.items():
        assert outcome[kind] == outcomes["plain"][kind], policy


def test_streaming_prefixes_changes_nothing(outcomes: dict[str, dict[str, Any]]) -> None:
    for policy, outcome in outcomes.items():
        for name in STREAMABLE:
            assert outcome["streamed"][name] == outcomes["plain"]["together"][name], policy


@pytest.mark.long
def test_short_blocks() -> None:
    """Every algorithm with blocks of 4: the same answers with commits of their own and without."""
    (path, block), asked, found = MODELS["sdar"], prompts("sdar"), []
    for settings in ({"fused_commit": "off"}, {"fused_commit": "on"}):
        options: dict[str, Any] = {"additional_config": {"dllm": settings}, "max_num_seqs": 96}
        with engine(path, block, async_scheduling=True, **options) as running:
            found.append(ask(running, asked, NAMES, 64))
    assert found[0] == found[1]
    # Problems as easy as these have one answer, unless an algorithm edits what the model has never
    # seen to be wrong.
    sequential = found[0]["Sequential"]
    for name in STREAMABLE:
        same = sum(a == b for a, b in zip(found[0][name], sequential, strict=True))
        assert same >= len(asked) - 3, name


def test_less_work(outcomes: dict[str, dict[str, Any]]) -> None:
    """Proves that the short cuts were taken."""
    plain = outcomes["plain"]["steps"]
    assert outcomes["early"]["steps"] < plain
    if "fused" in outcomes:
        assert outcomes["fused"]["steps"] < outcomes["no-last-commit"]["steps"] <= plain
    assert outcomes["sync"]["steps"] > outcomes["early"]["steps"], "waiting costs passes"


def test_short_answers_stop_at_max_tokens(outcomes: dict[str, dict[str, Any]]) -> None:
    for name in NAMES:
        short, full = outcomes["plain"]["short"][name], outcomes["plain"]["together"][name]
        for (tokens, reason), (longer, _) in zip(short, full, strict=True):
            assert tokens == longer[:5]
            assert reason == ("stop" if tokens == longer else "length")


@pytest.fixture
def running() -> Iterator[Engine]:
    """JointThreshold is the server's, from a YAML file."""
    with engine(TINY_LLADA2, 32, additional_config=SERVER) as started:
        yield started


SERVER = {"dllm": {"algorithm": "JointThreshold-Q", "threshold": 0.8}}


def largest(bank: AlgorithmSlots) -> dict[str, float]:
    """The largest value of each setting in any slot."""
    return dict(zip(bank.names, bank.parameters.amax(0).tolist(), strict=True))


def test_the_server_s_algorithm_and_the_request_s(running: Engine) -> None:
    prompt = prompts("llada2")[2]
    running.generate([prompt], [greedy(4)])
    (bank,) = running.slots.algorithms.by_name.values()
    assert bank.algorithm.name == "JointThreshold"
    assert largest(bank)["threshold"] == pytest.approx(0.8)
    assert largest(bank)["edit_threshold"] == pytest.approx(0.5)
    running.generate([prompt], [greedy(4, diffusion_algorithm="FixedSteps", diffusion_steps=2)])
    assert largest(running.slots.algorithms.by_name["FixedSteps"])["steps"] == 2
