"""Streamed prefixes under preemption: a request that comes back goes on where it was.

With ``diffusion_stream_prefix`` a canvas has put out tokens before it is finished. Whoever is
preempted then has decided positions, a step count and an algorithm's state that the tokens alone
do not tell.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.checkpoints import TINY_LLADA2, TINY_SDAR
from tests.support.drive import TWO_BLOCKS, Driver, llada2
from tests.support.engine import Engine, count_calls, engine

pytestmark = [pytest.mark.engine, pytest.mark.slow]

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


# ---- preempted by priority: no page is left to share that is not final. Before the engines below,
# because vLLM's groups of processes end with the first engine that ends.

PAGE = 32
SMALL: dict[str, Any] = {
    "block_size": PAGE,
    "num_gpu_blocks_override": 40,
    "long_prefill_token_threshold": 32,
    "scheduling_policy": "priority",
    "max_num_batched_tokens": 96,
    "max_model_len": 320,
}
# Several blocks whose decided beginning leaves before they are committed.
BLOCKS = {"additional_config": {"dllm": {"blocks": 4}}, "diffusion_config": None}


def shared(running: Engine, request: Any, first: int) -> list[int]:
    """The pages of a request, from one on, that another request may find."""
    (ids,) = running.scheduler.kv_cache_manager.get_block_ids(request.request_id)
    return [n for n in ids[first:] if running.block_pool.blocks[n].block_hash is not None]


@pytest.mark.parametrize("name", ["waits", "ahead", "blocks", "blocks ahead"])
def test_pages_of_dropped_steps_are_forgotten(name: str) -> None:
    family = llada2()
    options: dict[str, Any] = SMALL | {"async_scheduling": name.endswith("ahead")}
    several = name.startswith("blocks")
    path, length = (TINY_SDAR, 8) if several else (family.path, family.length)
    with engine(path, length, **(options | (BLOCKS if several else {}))) as running:
        scheduler, wrong, found = running.scheduler, [], []
        original = scheduler._preempt_request

        def preempt(request: Any, *args: Any, **kwargs: Any) -> None:
            ids = scheduler.kv_cache_manager.get_block_ids(request.request_id)[0]
            # A canvas that streams counts as computed, and so does a step in flight.
            final = max(0, request.num_computed_tokens - 2 * running.slots.length) // PAGE
            found.extend(shared(running, request, request.num_computed_tokens // PAGE))
            original(request, *args, **kwargs)
            pool = running.block_pool.blocks
            wrong.extend(n for n in ids[final:] if pool[n].block_hash is not None)

        scheduler._preempt_request = preempt
        manager, full = scheduler.kv_cache_manager, [True]
        allocate = manager.allocate_slots

        def allocate_slots(request: Any, *args: Any, **kwargs: Any) -> Any:
            """No page is left when the second request, which runs already, wants its next one."""
            if request in scheduler.running and request.priority == 0 and full:
                full.clear()
                return None
            return allocate(request, *args, **kwargs)

        manager.allocate_slots = allocate_slots
        driver = Driver(running)
        vocabulary = range(20, 100) if several else family.vocabulary
        core = running.llm.llm_engine
        for n, length in enumerate((280, 30)):
            prompt = [vocabulary[(7 * n + i) % 70] for i in range(length)]
            streams = {"diffusion_stream_prefix": True}
            asked = family.params(30 if n == 0 else 90, "quick", ignore_eos=True, **streams)
            priority = 0 if n else 9
            core.add_request(f"{n}", {"prompt_token_ids": prompt}, asked, priority=priority)
            driver.step()
        driver.finish()
        assert found, "nobody was preempted after being scheduled"
        assert not wrong
        running.assert_idle()


# ---- copies that preempt each other


@pytest.fixture(scope="module")
def engines() -> Iterator[Callable[[str], Engine]]:
    """The engine of a mode, which is started once."""
    running: dict[str, Engine] = {}
    with contextlib.ExitStack() as started:

        def of(mode: str) -> Engine:
            if mode not in running:
                options = CROWDED | MODES[mode]
                running[mode] = started.enter_context(engine(TINY_LLADA2, 32, **options))
            return running[mode]

        yield of


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
