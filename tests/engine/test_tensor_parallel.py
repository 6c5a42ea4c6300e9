"""Two ranks give what one gives: the head's shards meet, and every rank draws the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import reference_gemma
from tests.engine.harness import answers_of_child, engine
from tests.reference_llada2 import random_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# A power of two, so that the shards are whole groups of ids and draw what one rank draws.
VOCABULARY = 512
CASES: dict[str, list[dict[str, Any]]] = {
    "llada2": [{"temperature": 0}],
    "gemma": [  # the seed also draws the first canvas
        {"temperature": 0, "seed": 1},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 2.0, "seed": 4, "top_k": 20},
        {"temperature": 1.0, "seed": 5, "logprobs": 2},
    ],
}


def answers(llm: Any, cases: list[dict[str, Any]]) -> list[list[int]]:
    """The tokens of prompts of several lengths, asked together."""
    from vllm import SamplingParams

    generator = torch.Generator().manual_seed(0)
    prompts, params = [], []
    for length in (3, 20, 40):
        prompt = torch.randint(20, VOCABULARY - 20, (length,), generator=generator).tolist()
        for case in cases:
            prompts.append({"prompt_token_ids": prompt})
            params.append(SamplingParams(max_tokens=40, ignore_eos=True, **case))
    return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize("name", CASES)
def test_two_ranks(name: str, tmp_path: Path) -> None:
    if name == "gemma":
        reference_gemma.random_checkpoint(tmp_path, 0, vocab_size=VOCABULARY)
    else:
        random_checkpoint(tmp_path, 0, vocab_size=VOCABULARY)
    (two,) = answers_of_child("parallel_child", tmp_path, CASES[name])
    with engine(tmp_path, 32) as running:
        one = answers(running.llm, CASES[name])
    assert two == one
