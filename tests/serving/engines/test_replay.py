"""A trace can be replayed: a plain model finds every decision and its logprob again.

The models are `transformers`' Qwen3 under SDAR's mask, and the test suite's own LLaDA2. They read
the canvas as it was before each step, which follows from the trace alone, without cache or batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from examples.tiny.tasks import held_out_set
from examples.tiny.tokens import llada2_tokenizer, sdar_tokenizer
from examples.tiny.training import Encoder
from tests.support import reference_llada2, reference_sdar
from tests.support.checkpoints import TINY_LLADA2, TINY_SDAR
from tests.support.engine import engine

pytestmark = pytest.mark.engine

WANTED = {"diffusion_trace": True, "diffusion_replay": True}
LIMIT = 1e-4  # of a logprob in float32, as the issue of traces asks for
Logits = Callable[[list[int]], torch.Tensor]


def llada2() -> tuple[Any, int, int, Any, Logits]:
    tokenizer = llada2_tokenizer()
    mask = tokenizer.mask_token_id
    reference = reference_llada2.Reference.load(TINY_LLADA2, 32, mask)
    return TINY_LLADA2, 32, mask, tokenizer, reference.logits


def sdar() -> tuple[Any, int, int, Any, Logits]:
    reference, tokenizer = reference_sdar.Reference(TINY_SDAR), sdar_tokenizer()
    mask = tokenizer.mask_token_id
    return TINY_SDAR, 4, mask, tokenizer, reference.logits


def replayed(prompt: list[int], replay: Any, length: int, mask: int, logits: Logits) -> list[float]:
    """The logprob of each token of the rollout, from its ids and its step map alone."""
    ids = prompt + replay.dllm_replay_token_ids
    steps = [0] * len(prompt) + replay.dllm_replay_step_maps
    assert len(ids) % length == 0, "whole blocks"
    found = [0.0] * len(ids)
    for start in range(0, len(ids), length):
        block = range(start, start + length)
        for step in sorted({steps[at] for at in block} - {0}):
            canvas = [ids[at] if steps[at] < step else mask for at in block]
            with torch.no_grad():
                scores = logits(ids[:start] + canvas)[start:].log_softmax(-1)
            for at in block:
                if steps[at] == step:
                    found[at] = float(scores[at - start, ids[at]])
    return found[len(prompt) :]


@pytest.mark.parametrize("family", [llada2, pytest.param(sdar, marks=pytest.mark.long)])
def test_replay(family: Callable[[], tuple[Any, int, int, Any, Logits]]) -> None:
    from vllm import SamplingParams

    path, length, mask, tokenizer, logits = family()
    encoder = Encoder(tokenizer)
    prompts = [encoder(problem).prompt for problem in held_out_set(3)]
    names = ("LowConfidence", "LowConfidenceDynamic", "Sequential", "EntropyBounded")
    params = [
        SamplingParams(
            max_tokens=30,
            temperature=temperature,
            seed=index,
            extra_args=WANTED | {"diffusion_algorithm": names[index % len(names)]},
        )
        for temperature in (0.0, 0.8)
        for index in range(len(prompts))
    ]
    with engine(path, length, max_num_seqs=64) as running:
        asked = [{"prompt_token_ids": prompt} for prompt in prompts * 2]
        outputs = running.llm.generate(asked, params, use_tqdm=False)
    decided = 0
    for prompt, output in zip(prompts * 2, outputs, strict=True):
        completion = output.outputs[0]
        again = replayed(prompt, completion.diffusion_replay, length, mask, logits)
        recorded = [
            event.logprob
            for block in completion.diffusion_trace.blocks
            for _, event in sorted(block.deciding().items())
            if event.step
        ]
        assert torch.tensor(recorded) == pytest.approx(torch.tensor(again), abs=LIMIT)
        assert completion.diffusion_trace.logprobs == recorded[: len(completion.token_ids)]
        decided += len(recorded)
    assert decided > 500
