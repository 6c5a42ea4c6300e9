"""Prompts from Parquet to Parquet with Ray Data: an engine that dies is replaced.

    .venv-ray/bin/python examples/cluster/ray_data.py problems.parquet answers

Each row has a "prompt"; the output repeats the row and adds an "answer". It runs on the cluster of
this machine (`ray start`), else in a Ray of its own. The default is the tiny model of this
repository on the CPU; `--model inclusionAI/LLaDA2.0-mini` gives each engine a GPU.
"""

import argparse
from pathlib import Path
from typing import Any

import ray
from ray.data import SaveMode
from ray.data.llm import build_processor, vLLMEngineProcessorConfig

TINY = Path(__file__).resolve().parents[1] / "tiny" / "checkpoints" / "tiny-llada2"
SMALL = {"enforce_eager": True, "max_model_len": 1024, "kv_cache_memory_bytes": 1 << 28}
# Without a GPU, and with threads that engines on one machine do not all bind to the same cores.
ON_CPU: dict[str, Any] = {
    "model_source": str(TINY),
    "engine_kwargs": SMALL | {"dtype": "float32"},  # whatever is in the batch beside an answer
    "placement_group_config": {"bundles": [{"CPU": 0.25}]},
    "runtime_env": {"env_vars": {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}},
}


def main(source: str, target: str, config: vLLMEngineProcessorConfig, max_tokens: int) -> None:
    # A block goes to an engine as a whole, and to another one when the engine dies.
    rows = ray.data.read_parquet(source).repartition(target_num_rows_per_block=config.batch_size)
    columns = rows.schema().names
    sampling = {"temperature": 0, "max_tokens": max_tokens}  # Ray passes over the model's own

    def ask(row: dict[str, Any]) -> dict[str, Any]:
        messages = [{"role": "user", "content": row["prompt"]}]
        return {"messages": messages, "sampling_params": sampling}

    def keep(row: dict[str, Any]) -> dict[str, Any]:
        return {name: row[name] for name in columns} | {"answer": row["generated_text"]}

    answered = build_processor(config, preprocess=ask, postprocess=keep)(rows)
    # Not into a folder that is there: a second run would add its rows to those of the first.
    answered.write_parquet(str(Path(target).resolve()), mode=SaveMode.ERROR)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("source", help="a file or a folder of Parquet")
    parser.add_argument("target", help="the folder to make, with a file for each batch")
    parser.add_argument("--model", help="any diffusion model, on GPUs; default: tiny-llada2")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=128)
    args = parser.parse_args()
    settings = {"model_source": args.model} if args.model else ON_CPU
    # Two numbers of engines, because one would be the most of them; and vLLM's own tokenizer.
    settings |= {"concurrency": (args.engines, args.engines), "batch_size": 64}
    settings |= {"tokenize_stage": False, "detokenize_stage": False}
    settings |= {"chat_template_stage": {"num_cpus": 0.1}}
    main(args.source, args.target, vLLMEngineProcessorConfig(**settings), args.max_tokens)
