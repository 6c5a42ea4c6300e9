"""KV blocks: held for exactly as long as they are needed, and never touched in between."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import oracle
from tests.support.engine import Engine, count_calls, engine, greedy

pytestmark = pytest.mark.engine


def start(running: Engine, prompt: list[int], max_tokens: int, **options: Any) -> None:
    running.llm.llm_engine.add_request(
        "r", {"prompt_token_ids": prompt}, greedy(max_tokens, ignore_eos=True, **options)
    )


def held(running: Engine) -> tuple[list[int], ...]:
    (request_id,) = running.scheduler.requests
    return running.scheduler.kv_cache_manager.get_block_ids(request_id)


@pytest.mark.parametrize("name", ["ckpt_a_b32", pytest.param("ckpt_b_b8", marks=pytest.mark.long)])
def test_none_moves_between_denoise_steps(name: str) -> None:
    """An unfinished block reuses its KV in place: the pool is not even asked."""
    golden = oracle.checkpoint(name)
    length = golden.block_size
    with engine(golden.path, length, block_size=32) as running:
        # One token a step, so that a block takes L denoise steps and a commit.
        start(running, golden.prompts["p33"].tokens, 4 * length, diffusion_threshold=2.0)
        running.step()
        taken = count_calls(running.block_pool, "get_new_blocks")
        returned = count_calls(running.block_pool, "free_blocks")
        first_steps = 0
        while running.scheduler.requests:
            emitted = next(iter(running.scheduler.requests.values())).num_output_tokens
            before, calls = held(running), (len(taken), len(returned))
            running.step()
            if not running.scheduler.requests:
                break
            step_in_block = running.slots.step.max().item()
            if step_in_block > 1:
                assert held(running) == before
                assert (len(taken), len(returned)) == calls
            elif step_in_block == 1:
                first_steps += 1
            assert emitted <= 4 * length
        assert first_steps == 5 - (33 % length == 0)
        running.assert_idle()


def test_async_allocates_once_per_page() -> None:
    """With a step in flight the next page is taken early, still once, and none goes back."""
    golden = oracle.checkpoint("ckpt_a_b32")
    with engine(golden.path, 32, block_size=32, async_scheduling=True) as running:
        taken = count_calls(running.block_pool, "get_new_blocks")
        returned = count_calls(running.block_pool, "free_blocks")
        running.generate(
            [golden.prompts["p33"].tokens], [greedy(128, ignore_eos=True, diffusion_threshold=2.0)]
        )
        # 161 tokens are 6 pages; one more may have been taken for the step in flight.
        assert 6 <= sum(taken) <= 7
        assert len(returned) == 1
        running.assert_idle()


@pytest.mark.parametrize("asynchronous", [True, pytest.param(False, marks=pytest.mark.long)])
def test_only_committed_blocks_are_cached(asynchronous: bool) -> None:
    """Asking on with prompt + answer hits the cache and gives what a fresh engine gives."""
    golden = oracle.checkpoint("ckpt_b_b8")
    prompt = golden.prompts["p100"].tokens
    options = {"block_size": 32, "async_scheduling": asynchronous}
    with engine(golden.path, 8, **options) as running:
        first = running.generate([prompt], [greedy(60, ignore_eos=True)])[0][0]
        longer = [prompt + first[:n] for n in (1, 8, 28, 59, 60)]
        params = [greedy(20, ignore_eos=True) for _ in longer]
        cached = [running.generate([p], [q])[0] for p, q in zip(longer, params, strict=True)]
        assert running.llm.llm_engine.engine_core.engine_core.scheduler.requests == {}
    with engine(golden.path, 8, enable_prefix_caching=False) as running:
        assert running.generate(longer, params) == cached
