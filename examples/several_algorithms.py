"""One batch whose requests decode by different algorithms, each with settings of its own.

    .venv/bin/python examples/several_algorithms.py

`--model inclusionAI/LLaDA2.0-mini` runs it on a real model. Over HTTP the same options go into
`vllm_xargs`.
"""

import argparse
from pathlib import Path

from vllm import LLM

TINY = Path(__file__).resolve().parent / "tiny" / "checkpoints" / "tiny-llada2"
# For a laptop; leave them out on a GPU.
SMALL = {"enforce_eager": True, "max_model_len": 1024, "kv_cache_memory_bytes": 1 << 28}
OPTIONS = [
    {},  # as the server was set: the model's default
    {"diffusion_algorithm": "LowConfidence", "diffusion_threshold": 0.5},
    {"diffusion_algorithm": "JointThreshold", "diffusion_edit_threshold": 0.9},
    {"diffusion_algorithm": "FixedSteps", "diffusion_steps": 8},
    {"diffusion_algorithm": "Sequential", "diffusion_steps": 4},
    {"diffusion_algorithm": "Hierarchical", "diffusion_low": 0.4},
    {"diffusion_algorithm": "Credit", "diffusion_alpha": 0.5},
    {"diffusion_algorithm": "EntropyBound", "diffusion_entropy_bound": 0.3},
]


def main(llm: LLM, prompt: str) -> None:
    params = []
    for options in OPTIONS:
        params.append(llm.get_default_sampling_params())
        params[-1].max_tokens = 64
        params[-1].extra_args = options
    message = {"role": "user", "content": prompt}
    outputs = llm.chat([[message]] * len(OPTIONS), params)
    for options, output in zip(OPTIONS, outputs, strict=True):
        algorithm, *settings = options.values() or ["the default"]
        print(f"{algorithm:16}{settings[0] if settings else '':<6}{output.outputs[0].text}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="a masked model (LLaDA2, SDAR); default: tiny-llada2")
    parser.add_argument("--prompt", default="reverse 52 97 23 71 40")
    args = parser.parse_args()
    main(LLM(args.model) if args.model else LLM(str(TINY), **SMALL), args.prompt)
