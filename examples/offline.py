"""Offline generation, as with any other model of vLLM.

    .venv/bin/python examples/offline.py
    .venv/bin/python examples/offline.py --model inclusionAI/LLaDA2.0-mini "Name three rivers."

The first command asks the tiny model of this repository, which knows a few tasks with numbers.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from vllm import LLM

TINY = Path(__file__).resolve().parent / "tiny" / "checkpoints" / "tiny-llada2"
# For a laptop; a GPU does better without.
SMALL = {"enforce_eager": True, "max_model_len": 1024, "kv_cache_memory_bytes": 1 << 28}
PROMPTS = ["64 + 28", "sort 61 35 88 14", "copy diffusion2026"]


def main(llm: LLM, prompts: list[str]) -> None:
    # The model's own recommendation: greedy. `SamplingParams()` alone would mean temperature 1.
    params = llm.get_default_sampling_params()
    params.max_tokens = 128  # vLLM's default is 16
    params.extra_args = {"diffusion_max_steps": 16}  # of each block; this request only
    conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
    for prompt, output in zip(prompts, llm.chat(conversations, params), strict=True):
        print(f"{prompt} -> {output.outputs[0].text}")


if __name__ == "__main__":  # vLLM starts processes, which may import this file
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("prompts", nargs="*", default=PROMPTS)
    parser.add_argument("--model", help="any diffusion model; default: tiny-llada2")
    args = parser.parse_args()
    main(LLM(args.model) if args.model else LLM(str(TINY), **SMALL), args.prompts)
