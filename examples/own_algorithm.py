"""A decoding algorithm of your own, tried without a package: the engine takes the path of a class.

    .venv/bin/python examples/own_algorithm.py

`--model inclusionAI/LLaDA2.0-mini` runs it on a real model. docs/adding_an_algorithm.md makes a
package of an algorithm, which requests to a server can choose.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

from vllm import LLM

from vllm_dllm.decoding import Algorithm, reveal
from vllm_dllm.ranges import AlgorithmConfig, setting

TINY = Path(__file__).resolve().parent / "tiny" / "checkpoints" / "tiny-llada2"
# For a laptop; leave them out on a GPU.
SMALL = {"enforce_eager": True, "max_model_len": 1024, "kv_cache_memory_bytes": 1 << 28}
STEPS = "vllm:diffusion_num_denoising_steps"


@dataclass(frozen=True)
class LeftToRightConfig(AlgorithmConfig):
    """What a server or a request may set."""

    width: int = setting(4, "positions to decide at each step", least=1, whole=True)


class LeftToRight(Algorithm):
    """Decide the first `width` open positions at every step."""

    name = "LeftToRight"
    config = LeftToRightConfig

    def step(self, canvas, context):
        place = canvas.masked.cumsum(dim=1)  # [slots, L]: 1 at the first open position
        return reveal(canvas, context, place <= context.parameters["width"][:, None])


def main(llm: LLM) -> None:
    params = llm.get_default_sampling_params()
    params.max_tokens = 64
    for width in (1, 4, 32):
        params.extra_args = {"diffusion_algorithm": "LeftToRight", "diffusion_width": width}
        message = {"role": "user", "content": "reverse 52 97 23 71 40"}
        before = sum(metric.value for metric in llm.get_metrics() if metric.name == STEPS)
        answer = llm.chat([message], params, use_tqdm=False)[0].outputs[0].text
        after = sum(metric.value for metric in llm.get_metrics() if metric.name == STEPS)
        print(f"width {width:2}: {answer!r} in {after - before} steps")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="a masked model (LLaDA2, SDAR); default: tiny-llada2")
    model = parser.parse_args().model
    settings = {"dllm": {"algorithm": "own_algorithm:LeftToRight"}}
    options = {"disable_log_stats": False, "additional_config": settings}  # statistics: the steps
    main(LLM(model, **options) if model else LLM(str(TINY), **SMALL, **options))
