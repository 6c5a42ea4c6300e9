"""Answers of a DiffusionGemma engine, with what is reported of every token."""

from __future__ import annotations

from typing import Any

from tests.support.engine import Engine

IMAGES = {"limit_mm_per_prompt": {"image": 1, "video": 0}, "max_num_batched_tokens": 1024}


def picture(seed: int) -> Any:
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 255, (4, 6, 3), dtype=np.uint8)
    return Image.fromarray(pixels.repeat(16, 0).repeat(16, 1))


def question(case: dict[str, Any]) -> dict[str, Any]:
    if "image" not in case:
        return {"prompt_token_ids": case["prompt"]}
    text = "<bos><|turn>user<|image|>what?<turn|><|turn>model"
    return {"prompt": text, "multi_modal_data": {"image": picture(case["image"])}}


def ask(running: Engine, asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tokens, and for every token the reported [id, logprob, rank], of some cases together."""
    from vllm import SamplingParams

    params = [
        SamplingParams(
            ignore_eos=True,
            extra_args=case["extra"],
            **{
                name: value
                for name, value in case.items()
                if name not in ("prompt", "extra", "image")
            },
        )
        for case in asked
    ]
    prompts = [question(case) for case in asked]
    answers = []
    for output in running.llm.generate(prompts, params, use_tqdm=False):
        one = output.outputs[0]
        reported = [
            sorted([token, info.logprob, info.rank] for token, info in position.items())
            for position in one.logprobs or []
        ]
        answers.append({"tokens": list(one.token_ids), "logprobs": reported})
    return answers
