"""Answers of an engine to prompts of several lengths."""

from __future__ import annotations

from typing import Any

import torch


def answers(llm: Any, cases: list[dict[str, Any]]) -> list[list[int]]:
    """The tokens of prompts of several lengths, asked together."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    generator = torch.Generator().manual_seed(0)
    last = llm.llm_engine.model_config.get_vocab_size() - 20
    prompts, params = [], []
    for length in (3, 20, 32, 40, 70):
        prompt = torch.randint(20, last, (length,), generator=generator).tolist()
        for case in cases:
            prompts.append({"prompt_token_ids": prompt})
            asked = {"max_tokens": 40, "ignore_eos": True} | case
            if "structured_outputs" in asked:
                asked["structured_outputs"] = StructuredOutputsParams(**asked["structured_outputs"])
            params.append(SamplingParams(**asked))
    return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]
