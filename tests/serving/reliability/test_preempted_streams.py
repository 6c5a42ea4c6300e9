"""Streamed prefixes under preemption: a request that comes back goes on where it was.

With ``diffusion_stream_prefix`` a canvas has put out tokens before it is finished. Whoever is
preempted then has decided positions, a step count and an algorithm's state that the tokens alone
do not tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.drive import TWO_BLOCKS, Driver
from tests.support.engine import Engine, count_calls, settings

pytestmark = [pytest.mark.engine, pytest.mark.slow]

MODEL = Path(__file__).resolve().parents[3] / "examples" / "tiny" / "checkpoints" / "tiny-llada2"
PROMPT = list(range(60, 97))
TOKENS = 200
COPIES, FEW = 48, 16
# Pages for about a third of what runs at a time.
CROWDED: dict[str, Any] = {
    "kv_cache_memory_bytes": 3 << 20,
    "block_size": 32,
    "max_model_len": 512,
    "max_num_seqs": 24,
}
# What a request keeps between the steps of a canvas, beside its tokens: nothing but a penalised
# canvas' own order, the credit of each token, the step that a schedule has come to, entropies.
ASKED: dict[str, dict[str, Any]] = {
    "greedy-penalty": {"frequency_penalty": 1.5, "presence_penalty": 0.5},
    "credit": {"diffusion_algorithm": "Credit"},
    "fixed-steps": {"diffusion_algorithm": "FixedSteps", "temperature": 1.0},
    "entropy-bound": {"diffusion_algorithm": "EntropyBound", "temperature": 1.0},
    "drawn": {"temperature": 1.0, "top_p": 0.95},
    "hierarchical": {"diffusion_algorithm": "Hierarchical"},
    "logprobs": {"temperature": 0.7, "logprobs": 2},
    "constrained": {"temperature": 0.7, "regex": "([a-f]{3} [0-9]{2}[,.] ){20,30}"},
}
MODES: dict[str, dict[str, Any]] = {
    "two-blocks": TWO_BLOCKS,
    "fdfo": {"async_scheduling": False},
    "fdfo-async": {"async_scheduling": True},
    "sync": {"async_scheduling": False, "additional_config": {"dllm": {"execution": "sync"}}},
    "sync-async": {"async_scheduling": True, "additional_config": {"dllm": {"execution": "sync"}}},
}
# The others are looked at by `make test-long`.
USUAL = {("two-blocks", "constrained")}
CASES = [
    pytest.param(mode, name, FEW)
    if (mode, name) in USUAL
    else pytest.param(mode, name, COPIES, marks=pytest.mark.long)
    for mode in MODES
    for name in ASKED
] + [pytest.param(*usual, COPIES, marks=pytest.mark.long) for usual in sorted(USUAL)]


def params(name: str, tokens: int = TOKENS, seed: int = 11, streams: bool = True) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    asked = {"temperature": 0.0} | ASKED[name]
    extra = {key: asked.pop(key) for key in list(asked) if key.startswith("diffusion_")}
    if streams:
        extra["diffusion_stream_prefix"] = True
    regex = asked.pop("regex", None)
    if regex is not None:
        asked["structured_outputs"] = StructuredOutputsParams(regex=regex)
        tokens = 2 * TOKENS  # as many as it may take
    return SamplingParams(
        **asked, max_tokens=tokens, ignore_eos=regex is None, seed=seed, extra_args=extra
    )


def answers(running: Engine, prompts: list[list[int]], asked: list[Any]) -> list[Any]:
    """(token ids, reason, their logprobs) of each, all submitted at once."""
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = [o.outputs[0] for o in running.llm.generate(given, asked, use_tqdm=False)]
    return [
        (
            list(o.token_ids),
            o.finish_reason,
            [each[t].logprob for each, t in zip(o.logprobs or (), o.token_ids, strict=False)],
        )
        for o in outputs
    ]


def same(answer: Any, alone: Any) -> bool:
    """Logprobs are floats of other batches; tokens are what they are."""
    return answer[:2] == alone[:2] and answer[2] == pytest.approx(alone[2], abs=1e-3)


@pytest.fixture(scope="module")
def engines() -> Iterator[Callable[[str], Engine]]:
    """The engine of a mode: one at a time."""
    running: dict[str, Engine] = {}

    def of(mode: str) -> Engine:
        if mode not in running:
            for other in running.values():
                other.close()
            running.clear()
            from vllm import LLM

            options = settings(32) | CROWDED | MODES[mode]
            running[mode] = Engine(LLM(model=str(MODEL), **options))
        return running[mode]

    yield of
    for last in running.values():
        last.close()


@pytest.mark.parametrize(("mode", "name", "copies"), CASES)
def test_copies_equal_the_request_alone(
    engines: Callable[[str], Engine], mode: str, name: str, copies: int
) -> None:
    """Catches decided positions, steps and an algorithm's state that begin anew in mid-block."""
    running = engines(mode)
    (alone,) = answers(running, [PROMPT], [params(name)])
    preempted = count_calls(running.scheduler, "_preempt_request")
    found = answers(running, [PROMPT] * copies, [params(name)] * copies)
    del running.scheduler._preempt_request
    different = sum(not same(answer, alone) for answer in found)
    assert len(preempted) >= copies / 4
    assert not different, f"{different} of {copies} with {len(preempted)} preemptions"
    assert not running.runner.model_state.interrupted


@pytest.mark.parametrize(
    ("mode", "every"),
    [
        ("two-blocks", 3),
        pytest.param("fdfo-async", 3, marks=pytest.mark.long),
        pytest.param("two-blocks", 1, marks=pytest.mark.long),
        pytest.param("fdfo-async", 1, marks=pytest.mark.long),
        pytest.param("sync-async", 2, marks=pytest.mark.long),
        pytest.param("fdfo", 2, marks=pytest.mark.long),
    ],
)
def test_results_that_are_dropped_come_again(
    engines: Callable[[str], Engine], mode: str, every: int
) -> None:
    """`reset_prefix_cache(reset_running_requests=True)` preempts all, and drops the step in flight.

    Catches a canvas that goes on behind tokens which nobody has received.
    """
    running = engines(mode)
    names = [name for name in ASKED if name != "constrained"]
    asked = {f"{name} {n}": params(name, 70, seed=n) for name in names for n in (1, 2)}
    prompts = {key: PROMPT[: 20 + 3 * n] for n, key in enumerate(asked)}
    alone = {key: answers(running, [prompts[key]], [asked[key]])[0] for key in asked}
    driver = Driver(running)
    for key, one in asked.items():
        driver.add(key, prompts[key], one)
    steps = 0
    while running.llm.llm_engine.has_unfinished_requests():
        driver.step()
        steps += 1
        assert steps < 3000
        if steps % (every * 5) == 0:
            running.scheduler.reset_prefix_cache(reset_running_requests=True)
    found = driver.finish()
    assert {key: found[key] for key in asked} == {key: alone[key][0] for key in asked}


def test_who_ends_while_waiting_is_forgotten(engines: Callable[[str], Engine]) -> None:
    """Catches interrupted canvases that are kept for requests that never come back."""
    running = engines("two-blocks")
    driver = Driver(running)
    for n in range(4):
        driver.add(f"{n}", PROMPT, params("fixed-steps", seed=n))
    interrupted = running.runner.model_state.interrupted
    for _ in range(30):
        driver.step()
    # All pages but one request's are held by nobody: whoever is preempted waits.
    victim = driver.request("2")
    running.scheduler.running.remove(victim)
    running.scheduler._preempt_request(victim, 0.0)
    running.scheduler.waiting.remove_requests([victim])
    driver.step()
    assert list(interrupted) == [victim.request_id]
    running.scheduler.waiting.add_request(victim)
    running.llm.llm_engine.abort_request(["2"])
    driver.finish()
    assert not interrupted
