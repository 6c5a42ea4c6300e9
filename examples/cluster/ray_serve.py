"""One address for several engines on a Ray cluster: Ray Serve LLM with its router.

    .venv-ray/bin/python examples/cluster/ray_serve.py

Then ask http://127.0.0.1:8000/v1 as any other server, for example with examples/stream_prefix.py.
It runs on the cluster of this machine (`ray start`), else in a Ray of its own, until Ctrl-C. The
default is the tiny model of this repository on the CPU; `--model inclusionAI/LLaDA2.0-mini` gives
each engine a GPU.
"""

import argparse
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.llm import LLMConfig, build_openai_app

TINY = Path(__file__).resolve().parents[1] / "tiny" / "checkpoints" / "tiny-llada2"
SMALL = {"enforce_eager": True, "max_model_len": 1024, "kv_cache_memory_bytes": 1 << 28}
# Without a GPU, and with threads that engines on one machine do not all bind to the same cores.
ON_CPU: dict[str, Any] = {
    "accelerator_config": {"kind": "cpu"},
    "engine_kwargs": SMALL | {"dtype": "float32"},  # whatever is in the batch beside an answer
    "placement_group_config": {"bundles": [{"CPU": 0.25}]},
    "runtime_env": {"env_vars": {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}},
}


def main(model: str | None, replicas: int, port: int) -> None:
    deployment: dict[str, Any] = {"num_replicas": replicas}
    if model is None:
        deployment["ray_actor_options"] = {"num_cpus": 0.25}  # two replicas on two cores
    config = LLMConfig(
        # The name that clients say, and where it is.
        model_loading_config={"model_id": model or TINY.name, "model_source": model or str(TINY)},
        deployment_config=deployment,
        **({} if model else ON_CPU),
    )
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    try:
        serve.run(build_openai_app({"llm_configs": [config]}), blocking=True)
    except KeyboardInterrupt:
        serve.shutdown()  # a cluster would go on without this process


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="any diffusion model, on GPUs; default: tiny-llada2")
    parser.add_argument("--replicas", type=int, default=2, help="engines, on any nodes")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    main(args.model, args.replicas, args.port)
