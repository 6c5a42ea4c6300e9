"""Lengths at their limits, and what the scheduler may hand out."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support import oracle
from tests.support.engine import Engine, count_calls, engine, greedy

pytestmark = pytest.mark.engine


def long_answer(golden: Any, running: Engine, prompt: list[int], tokens: int) -> list[int]:
    return running.generate([prompt], [greedy(tokens, ignore_eos=True)])[0][0]


@pytest.mark.parametrize("asynchronous", [True, pytest.param(False, marks=pytest.mark.long)])
def test_context_is_filled_to_the_last_token(asynchronous: bool) -> None:
    """The prompt's tail must not cost the last canvas: prompt + output = max_model_len exactly."""
    golden = oracle.checkpoint("ckpt_a_b32")
    options = {"max_model_len": 128, "async_scheduling": asynchronous}
    with engine(golden.path, 32, **options) as running:
        for length in (1, 31, 32, 33, 64, 95, 96, 97, 100, 127):
            prompt = (golden.prompts["p100"].tokens * 2)[:length]
            tokens, reason = running.generate([prompt], [greedy(1000, ignore_eos=True)])[0]
            assert (length + len(tokens), reason) == (128, "length")
        running.assert_idle()


def test_a_prompt_that_fills_the_context_is_refused() -> None:
    golden = oracle.checkpoint("ckpt_a_b32")
    with engine(golden.path, 32, max_model_len=64) as running:
        from vllm.exceptions import VLLMValidationError

        for length in (64, 65):
            with pytest.raises(VLLMValidationError, match=r"maximum .* length"):
                running.generate([(golden.prompts["p100"].tokens)[:length]], [greedy(1)])


def test_chat_and_default_parameters() -> None:
    """`LLM.chat` without parameters takes the model's own: greedy."""
    golden = oracle.checkpoint("ckpt_b_b8")
    prompt = golden.prompts["p9"].tokens
    message = {"role": "user", "content": " ".join(f"t{i}" for i in prompt)}
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with engine(golden.path, 8) as running:
        assert running.llm.get_default_sampling_params().temperature == 0
        (answer,) = running.llm.chat([message], use_tqdm=False, chat_template=template)
        params = running.llm.get_default_sampling_params()
        assert running.generate([prompt], [params])[0][0] == list(answer.outputs[0].token_ids)


@pytest.mark.parametrize(
    "commits", [0, pytest.param(3, marks=pytest.mark.long)], ids=["fused", "commits"]
)
def test_vllms_own_step_limit_is_honoured(commits: int) -> None:
    """``--diffusion-config '{"max_denoising_steps": 1}'``: a block is one step (and a commit)."""
    golden = oracle.checkpoint("ckpt_b_b8")
    own = {"canvas_length": 8, "max_denoising_steps": 1}
    options = {"additional_config": {"dllm": {"fused_commit": False if commits else None}}}
    with engine(golden.path, 8, diffusion_config=own, max_num_seqs=1, **options) as running:
        steps = count_calls(running.runner.sampler.readout, "head")
        running.generate(
            [golden.prompts["p8"].tokens],
            [greedy(32, ignore_eos=True, diffusion_threshold=2.0)],
        )
        assert len(steps) == 4 + commits, "the last block needs no commit"


def test_context_is_rounded_down_to_whole_blocks() -> None:
    golden = oracle.checkpoint("ckpt_a_b32")
    with engine(golden.path, 32, max_model_len=100) as running:
        assert running.llm.llm_engine.model_config.max_model_len == 96
        tokens, reason = running.generate(
            [golden.prompts["p33"].tokens], [greedy(1000, ignore_eos=True)]
        )[0]
        assert (len(tokens), reason) == (96 - 33, "length")


def test_max_tokens_is_exact_and_a_prefix() -> None:
    golden = oracle.checkpoint("ckpt_b_b8")
    prompt = golden.prompts["p9"].tokens
    with engine(golden.path, 8) as running:
        whole = long_answer(golden, running, prompt, 83)
        for tokens in (1, 6, 7, 8, 9, 83):
            assert long_answer(golden, running, prompt, tokens) == whole[:tokens]


@pytest.mark.parametrize(
    "budget", [40, *(pytest.param(n, marks=pytest.mark.long) for n in (48, 100))]
)
def test_scheduler_rules(budget: int) -> None:
    """Chunks end on block boundaries or with the prompt; a canvas is whole or absent.

    Behind a canvas that has left, the next one is scheduled if the budget holds both.
    """
    golden = oracle.checkpoint("ckpt_a_b32")
    with engine(golden.path, 32, max_num_batched_tokens=budget) as running:
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
        prompts = [p.tokens for p in golden.prompts.values()]
        running.generate(prompts, [greedy(40) for _ in prompts])
        assert seen["chunks"] > len(prompts)
        assert seen["canvases"] > len(prompts)
        assert bool(seen["fused"]) == (budget >= 64)
        assert seen["commits"], "where the budget holds no canvas beside it"


def test_step_cap_decides_everything() -> None:
    """max_steps ends a block that would go on, without ever producing a mask."""
    golden = oracle.checkpoint("ckpt_a_b32")
    prompt = golden.prompts["p33"].tokens
    with engine(golden.path, 32) as running:
        params = greedy(64, ignore_eos=True, diffusion_threshold=2.0, diffusion_max_steps=3)
        tokens, _ = running.generate([prompt], [params])[0]
        assert len(tokens) == 64
        assert golden.mask_token_id not in tokens


def test_minimum_length_with_an_end_that_no_head_has(tmp_path: Path) -> None:
    """Such an id once indexed behind the logits, and the engine died."""
    golden = oracle.checkpoint("ckpt_b_b8")
    model = tmp_path / "model"
    shutil.copytree(golden.path, model, copy_function=shutil.copyfile)
    model.chmod(0o755)
    (model / "generation_config.json").write_text('{"eos_token_id": 100000}')
    prompt = {"prompt_token_ids": list(range(5, 20))}
    with engine(model, golden.block_size) as running:
        (output,) = running.llm.generate([prompt], [greedy(12, min_tokens=8)], use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 12
