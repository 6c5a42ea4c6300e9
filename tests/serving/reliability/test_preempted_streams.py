"""Streamed prefixes under preemption: a request that comes back goes on after what it has streamed.

With ``diffusion_stream_prefix`` a canvas has put out tokens before it is finished. They are fixed
when its request comes back, and the rest of the canvas is decided anew.
"""

from __future__ import annotations

import re
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
REGEX = "([a-f]{3} [0-9]{2}[,.] ){20,30}"
ASKED: dict[str, dict[str, Any]] = {
    "greedy-penalty": {"frequency_penalty": 1.5, "presence_penalty": 0.5},
    "credit": {"diffusion_algorithm": "Credit"},
    "fixed-steps": {"diffusion_algorithm": "FixedSteps", "temperature": 1.0},
    "entropy-bound": {"diffusion_algorithm": "EntropyBound", "temperature": 1.0},
    "drawn": {"temperature": 1.0, "top_p": 0.95},
    "hierarchical": {"diffusion_algorithm": "Hierarchical"},
    "logprobs": {"temperature": 0.7, "logprobs": 2},
    "constrained": {"temperature": 0.7, "regex": REGEX},
}
MODES: dict[str, dict[str, Any]] = {
    "two-blocks": TWO_BLOCKS,
    "fdfo": {"async_scheduling": False},
    "fdfo-async": {"async_scheduling": True},
    "sync": {"async_scheduling": False, "additional_config": {"dllm": {"execution": "sync"}}},
    "sync-async": {"async_scheduling": True, "additional_config": {"dllm": {"execution": "sync"}}},
}
# The others are looked at by `make test-long`.
USUAL = {
    *(("two-blocks", name) for name in ("credit", "constrained")),
}
CASES = [
    pytest.param(mode, name, FEW)
    if (mode, name) in USUAL
    else pytest.param(mode, name, COPIES, marks=pytest.mark.long)
    for mode in MODES
    for name in ASKED
] + [pytest.param(*usual, COPIES, marks=pytest.mark.long) for usual in sorted(USUAL)]


def params(name: str, tokens: int = TOKENS, seed: int = 11) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    asked = {"temperature": 0.0} | ASKED[name]
    extra = {key: asked.pop(key) for key in list(asked) if key.startswith("diffusion_")}
    extra["diffusion_stream_prefix"] = True
    regex = asked.pop("regex", None)
    if regex is not None:
        asked["structured_outputs"] = StructuredOutputsParams(regex=regex)
        tokens = 2 * TOKENS  # as many as it may take
    return SamplingParams(
        **asked, max_tokens=tokens, ignore_eos=regex is None, seed=seed, extra_args=extra
    )


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
def test_answers_are_whole(
    engines: Callable[[str], Engine], mode: str, name: str, copies: int
) -> None:
    running = engines(mode)
    preempted = count_calls(running.scheduler, "_preempt_request")
    given = [{"prompt_token_ids": PROMPT}] * copies
    outputs = running.llm.generate(given, [params(name)] * copies, use_tqdm=False)
    del running.scheduler._preempt_request
    assert len(preempted) >= copies / 4
    tokenizer = running.llm.get_tokenizer()
    for (answer,) in (output.outputs for output in outputs):
        if name == "constrained":
            text = tokenizer.decode(answer.token_ids, skip_special_tokens=True)
            assert answer.finish_reason == "stop" and re.fullmatch(REGEX, text)
        else:
            assert (answer.finish_reason, len(answer.token_ids)) == ("length", TOKENS)
        if name == "logprobs":
            assert all(t in each for each, t in zip(answer.logprobs, answer.token_ids, strict=True))


@pytest.mark.parametrize(
    ("mode", "every"),
    [
        ("two-blocks", 3),
        pytest.param("fdfo-async", 3, marks=pytest.mark.long),
        pytest.param("fdfo-async", 1, marks=pytest.mark.long),
        pytest.param("sync-async", 2, marks=pytest.mark.long),
        pytest.param("fdfo", 2, marks=pytest.mark.long),
    ],
)
def test_results_that_are_dropped_come_again(
    engines: Callable[[str], Engine], mode: str, every: int
) -> None:
    """`reset_prefix_cache(reset_running_requests=True)` preempts all, and drops the step in flight.

    Catches a canvas that goes on after tokens which nobody has received.
    """
    running = engines(mode)
    names = [name for name in ASKED if name != "constrained"]
    asked = {f"{name} {n}": params(name, 70, seed=n) for name in names for n in (1, 2)}
    driver = Driver(running)
    for n, (key, one) in enumerate(asked.items()):
        driver.add(key, PROMPT[: 20 + 3 * n], one)
    steps = 0
    while running.llm.llm_engine.has_unfinished_requests():
        driver.step()
        steps += 1
        assert steps < 3000
        if steps % (every * 40) == 0:
            running.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert {key: len(tokens) for key, tokens in driver.finish().items()} == dict.fromkeys(asked, 70)
