"""Lengths at their limits, what the scheduler may hand out, and for how long pages are held."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError

from tests.support import oracle
from tests.support.engine import count_calls, engine, greedy
from tests.support.families import AHEAD, FUSED, dllm
from tests.support.reference_sdar import random_checkpoint

pytestmark = pytest.mark.engine

MANY = greedy(1000, ignore_eos=True)
APART = AHEAD | dllm(fused_commit="off")


def blocks_of_32() -> oracle.Checkpoint:
    return oracle.checkpoint("ckpt_a_b32")


@pytest.fixture(scope="module")
def golden() -> oracle.Checkpoint:
    """Blocks of 8."""
    return oracle.checkpoint("ckpt_b_b8")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Blocks of 4."""
    return random_checkpoint(tmp_path_factory.mktemp("sdar"), experts=False, block=4)


@pytest.mark.parametrize("asked", [128, 150])
def test_context_is_filled_to_the_last_token(asked: int) -> None:
    """The prompt's tail must not cost the last canvas; a context is rounded to whole blocks."""
    with engine(
        blocks_of_32().path, 32, max_model_len=asked, async_scheduling=asked == 128
    ) as running:
        assert running.llm.llm_engine.model_config.max_model_len == 128
        for length in (1, 31, 32, 33, 64, 95, 96, 97, 100, 127):
            prompt = (blocks_of_32().prompts["p100"].tokens * 2)[:length]
            tokens, reason = running.generate([prompt], [MANY])[0]
            assert (length + len(tokens), reason) == (128, "length")
        for length in (128, 129):
            with pytest.raises(VLLMValidationError, match=r"maximum .* length"):
                running.generate(
                    [(blocks_of_32().prompts["p100"].tokens * 2)[:length]], [greedy(1)]
                )
        running.assert_idle()


def test_windows_of_two_blocks_fill_the_context(small: Path) -> None:
    """From every place in the last three blocks, also where masks would lie behind the context."""
    limits = {"max_model_len": 64, "diffusion_config": None}
    prompts = [[(7 * i) % 290 for i in range(n)] for n in range(1, 64)]
    with engine(small, 4, **(APART | limits)) as running:
        alone = running.generate(prompts, [MANY] * 63)
    with engine(small, 4, **(FUSED | limits)) as running:
        assert running.generate(prompts, [MANY] * 63) == alone
        running.assert_idle()
    assert {len(p) + len(tokens) for p, (tokens, _) in zip(prompts, alone, strict=True)} == {64}


@pytest.mark.parametrize(("options", "most"), [(FUSED, 2.0), (APART, 3.0)], ids=["on", "off"])
def test_no_pass_only_commits(small: Path, options: dict[str, Any], most: float) -> None:
    """Two denoise steps a block; one more for a commit, and one in flight behind the last."""
    with engine(small, 4, diffusion_config=None, **options) as running:
        passes = count_calls(running.runner.sampler.canvas_update, "plan")
        params = greedy(400, ignore_eos=True, diffusion_algorithm="Sequential", diffusion_steps=2)
        ((tokens, _),) = running.generate([list(range(8))], [params])
        assert len(tokens) == 400
        assert most * 100 - 1 <= len(passes) <= most * 100 + 1
        running.assert_idle()


@pytest.mark.parametrize("commits", [0, 3], ids=["fused", "commits"])
def test_vllms_own_step_limit_is_honoured(golden: oracle.Checkpoint, commits: int) -> None:
    """``--diffusion-config '{"max_denoising_steps": 1}'``: a block is one step (and a commit)."""
    own = {"canvas_length": 8, "max_denoising_steps": 1}
    options = dllm(fused_commit=False if commits else None)
    with engine(golden.path, 8, diffusion_config=own, max_num_seqs=1, **options) as running:
        steps = count_calls(running.runner.sampler.readout, "head")
        params = greedy(32, ignore_eos=True, diffusion_threshold=2.0)
        running.generate([golden.prompts["p8"].tokens], [params])
        assert len(steps) == 4 + commits, "the last block needs no commit"


def test_minimum_length_with_an_end_that_no_head_has(
    golden: oracle.Checkpoint, tmp_path: Path
) -> None:
    """Such an id once indexed behind the logits, and the engine died."""
    model = tmp_path / "model"
    shutil.copytree(golden.path, model, copy_function=shutil.copyfile)
    model.chmod(0o755)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": 100000}))
    with engine(model, golden.block_size) as running:
        ((tokens, _),) = running.generate([list(range(5, 20))], [greedy(12, min_tokens=8)])
    assert len(tokens) == 12


@pytest.mark.parametrize("budget", [40, pytest.param(100, marks=pytest.mark.long)])
def test_scheduler_rules(budget: int) -> None:
    """Chunks end on block boundaries or with the prompt; a canvas is whole or absent.

    Behind a canvas that has left, the next one is scheduled if the budget holds both.
    """
    with engine(blocks_of_32().path, 32, max_num_batched_tokens=budget) as running:
        schedule, seen = running.scheduler.schedule, Counter()

        def checked(*args: Any, **kwargs: Any) -> Any:
            computed = {
                r.request_id: r.num_computed_tokens for r in running.scheduler.requests.values()
            }
            output = schedule(*args, **kwargs)
            for request_id, tokens in output.num_scheduled_tokens.items():
                request = running.scheduler.requests[request_id]
                if request_id in output.scheduled_spec_decode_tokens:
                    assert len(output.scheduled_spec_decode_tokens[request_id]) == 32
                    assert tokens in (32, 64)
                    assert (tokens == 64) == (computed[request_id] < request.num_tokens)
                    seen["fused" if tokens == 64 else "canvases"] += 1
                else:
                    # Read after scheduling: a cache hit counts as computed.
                    end = request.num_computed_tokens
                    assert end % 32 == 0 or end == request.num_tokens
                    assert end - tokens >= computed[request_id]
                    seen["chunks" if not request.num_output_tokens else "commits"] += 1
            return output

        running.scheduler.schedule = checked
        prompts = [p.tokens for p in blocks_of_32().prompts.values()]
        running.generate(prompts, [greedy(40) for _ in prompts])
        assert seen["chunks"] > len(prompts)
        assert seen["canvases"] > len(prompts)
        assert bool(seen["fused"]) == (budget >= 64)
        assert seen["commits"], "where the budget holds no canvas beside it"


def test_no_page_moves_between_denoise_steps() -> None:
    """An unfinished block reuses its KV in place: the pool is not even asked."""
    with engine(blocks_of_32().path, 32, block_size=32, **dllm(passes_per_step=1)) as running:
        # One token a step, so that a block takes L denoise steps and a commit.
        params = greedy(128, ignore_eos=True, diffusion_threshold=2.0)
        prompt = {"prompt_token_ids": blocks_of_32().prompts["p33"].tokens}
        running.llm.llm_engine.add_request("r", prompt, params)
        running.step()
        ((request_id, _),) = running.scheduler.requests.items()
        taken = count_calls(running.block_pool, "get_new_blocks")
        returned = count_calls(running.block_pool, "free_blocks")
        first_steps = 0
        while True:
            held = running.scheduler.kv_cache_manager.get_block_ids(request_id)
            calls = len(taken), len(returned)
            running.step()
            if not running.scheduler.requests:
                break
            step_in_block = running.slots.step.max().item()
            if step_in_block > 1:
                assert running.scheduler.kv_cache_manager.get_block_ids(request_id) == held
                assert (len(taken), len(returned)) == calls
            first_steps += step_in_block == 1
        assert first_steps == 5
        running.assert_idle()


def test_a_step_in_flight_takes_each_page_once() -> None:
    """The next page is taken early, still once, and none goes back."""
    with engine(blocks_of_32().path, 32, block_size=32, async_scheduling=True) as running:
        taken = count_calls(running.block_pool, "get_new_blocks")
        returned = count_calls(running.block_pool, "free_blocks")
        params = greedy(128, ignore_eos=True, diffusion_threshold=2.0)
        running.generate([blocks_of_32().prompts["p33"].tokens], [params])
        # 161 tokens are 6 pages; one more may have been taken for the step in flight.
        assert 6 <= sum(taken) <= 7
        assert len(returned) == 1
        running.assert_idle()
