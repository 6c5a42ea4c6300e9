"""Mixed requests to the tiny checkpoints, with and without tracing."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from examples.tiny.tasks import held_out_set
from examples.tiny.tokens import gemma_processor, llada2_tokenizer, sdar_tokenizer
from examples.tiny.training import Encoder
from tests.support.checkpoints import TINY_GEMMA, TINY_LLADA2, TINY_SDAR
from tests.support.engine import Engine
from vllm_dllm.decoding import get_algorithm
from vllm_dllm.decoding.registry import algorithm_names

TRACED = dict.fromkeys(("diffusion_trace", "diffusion_return_step_maps", "diffusion_replay"), True)
FAMILIES: dict[str, tuple[Path, int, Any, str]] = {
    "llada2": (TINY_LLADA2, 32, llada2_tokenizer, "mask"),
    "sdar": (TINY_SDAR, 4, sdar_tokenizer, "mask"),
    "gemma": (TINY_GEMMA, 32, lambda: gemma_processor().tokenizer, "uniform"),
}


def mixed(family: str, count: int, seed: int = 1) -> Iterator[tuple[list[int], dict[str, Any]]]:
    _, _, tokenizer, corruption = FAMILIES[family]
    encoder, chance = Encoder(tokenizer()), random.Random(seed)
    problems = held_out_set(4)
    for index in range(count):
        prompt = encoder(chance.choice(problems)).prompt
        options: dict[str, Any] = {"max_tokens": chance.choice([1, 3, 17, 40, 70]), "seed": index}
        algorithm = chance.choice(algorithm_names(corruption, of_every_model=True))
        draws = get_algorithm(algorithm, corruption)[0].samples and chance.random() < 0.3
        options["temperature"] = 0.7 if draws else 0.0
        extra: dict[str, Any] = {"diffusion_algorithm": algorithm}
        edits = algorithm.startswith("JointThreshold")
        if corruption == "mask" and not edits and chance.random() < 0.3:
            extra["diffusion_stream_prefix"] = True
        if chance.random() < 0.3:
            options["logprobs"] = chance.choice([0, 1, 3])
        if chance.random() < 0.2:
            options["ignore_eos"] = True
        elif options["max_tokens"] > 1 and chance.random() < 0.2:
            options["regex"] = "[0-9]{1,40}"
        if draws and chance.random() < 0.3:
            options["n"] = 2
        yield prompt, options | {"extra_args": extra}


def parameters(options: dict[str, Any], traced: dict[str, Any]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    known = {k: v for k, v in options.items() if k != "regex"}
    if "regex" in options:
        known["structured_outputs"] = StructuredOutputsParams(regex=options["regex"])
    known["extra_args"] = options["extra_args"] | traced
    return SamplingParams(**known)


def wanted(options: dict[str, Any], traced: dict[str, Any]) -> dict[str, Any]:
    """An answer whose prefix is streamed ends before its last canvas does, so it has no replay."""
    if "diffusion_stream_prefix" not in options["extra_args"]:
        return traced
    return {name: value for name, value in traced.items() if name != "diffusion_replay"}


def completions(running: Engine, asked: list[Any], traced: dict[str, Any]) -> list[list[Any]]:
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in asked]
    params = [parameters(options, wanted(options, traced)) for _, options in asked]
    return [r.outputs for r in running.llm.generate(prompts, params, use_tqdm=False)]
