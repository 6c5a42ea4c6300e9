"""Run one case in a separate process: start an engine, send all requests, write the answers.

    python -m vllm_dllm.selftest.child JOB.json ANSWER.json

A job has a `case`, a `model` (a folder), and `requests` and `problems` of a golden file. The
answers go to the parent, which judges them. A process that dies leaves no answers.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# These variables are read when vLLM is imported, which happens below.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "INFO",
    "HF_HUB_OFFLINE": "1",
    # Several children would write the cache at once, and the installed code should compile what is
    # tried.
    "VLLM_DISABLE_COMPILE_CACHE": "1",
    # Otherwise Triton multiplies float32 matrices in TF32, which has a mantissa of 10 bits.
    "TRITON_F32_DEFAULT": "ieee",
}


def engine_options(case: Mapping[str, Any], model: str) -> dict[str, Any]:
    """Options of vLLM's `LLM` for a case, whose fields are those of `Case`."""
    options: dict[str, Any] = {
        "model": model,
        "dtype": case["dtype"],
        "max_model_len": 1024,
        "max_num_seqs": 16,
        "kv_cache_memory_bytes": 1 << 27,
        # vLLM only checks this against the free memory: the line above sets the size of the cache.
        "gpu_memory_utilization": 0.1,
        "kv_cache_dtype": case["cache"],
    }
    settings = {name: case[name] for name in ("window", "kernels", "fused_commit")}
    settings = {name: it for name, it in settings.items() if it not in ("symmetric", "default")}
    options["additional_config"] = {"dllm": settings}
    if case["family"] == "diffusion_gemma":
        options["limit_mm_per_prompt"] = {"image": 0, "video": 0}
    if case["scheduling"] != "default":
        options["async_scheduling"] = case["scheduling"] == "async"
    if case["graphs"] == "EAGER":
        options["enforce_eager"] = True
    elif case["graphs"] != "default":
        options["compilation_config"] = {"cudagraph_mode": case["graphs"]}
    # The CPU platform has a single backend, which is not requested.
    if case["backend"] not in ("default", "CPU_ATTN"):
        options["attention_config"] = {"backend": case["backend"]}
        if case["flash"] is not None:
            options["attention_config"]["flash_attn_version"] = case["flash"]
    return options


def serve(engine: Any, requests: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Submit all requests of a job to vLLM's engine at once.

    Returns:
        By id, `tokens` (ids), `parts` (the number of pieces in which they were streamed) and
        `logprobs` (for each token the (id, logprob) pairs that were asked for, likeliest first).
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    answers: dict[str, dict[str, Any]] = {
        request["id"]: {"tokens": [], "parts": 0, "logprobs": []} for request in requests
    }
    for request in requests:
        given = dict(request["params"])
        if "structured_outputs" in given:
            given["structured_outputs"] = StructuredOutputsParams(**given["structured_outputs"])
        kind = RequestOutputKind.DELTA if request["stream"] else RequestOutputKind.FINAL_ONLY
        params = SamplingParams(**given, output_kind=kind)
        engine.add_request(request["id"], {"prompt_token_ids": request["prompt"]}, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            answer = answers[output.request_id]
            (one,) = output.outputs
            answer["tokens"] += one.token_ids
            answer["parts"] += bool(one.token_ids)
            for place in one.logprobs or []:
                pairs = ((token, info.logprob) for token, info in place.items())
                answer["logprobs"].append(sorted(pairs, key=lambda pair: (-pair[1], pair[0])))
    return answers


def chosen(llm: Any) -> dict[str, Any]:
    """The options that the engine really serves with, read from its own objects."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention import Attention

    from vllm_dllm.attention.served_route import name_of

    config = llm.llm_engine.vllm_config
    core = llm.llm_engine.engine_core.engine_core
    state = core.model_executor.driver_worker.worker.model_runner.model_state
    layers = get_layers_from_vllm_config(config, Attention).values()
    # Only FlashAttention's layers have versions.
    found = (getattr(layer.impl, "vllm_flash_attn_version", None) for layer in layers)
    versions = {version for version in found if version}
    mode = config.compilation_config.cudagraph_mode
    fused = state.parts.window is not None or state.policy.fused
    return {
        "backend": ", ".join(sorted({name_of(layer.get_attn_backend()) for layer in layers})),
        "flash": max(versions, default=None),
        "graphs": "EAGER" if config.model_config.enforce_eager else mode.name,
        "kernels": "triton" if state.readout.triton else "torch",
        "scheduling": "async" if config.scheduler_config.async_scheduling else "sync",
        "fused_commit": "on" if fused else "off",
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "cache": config.cache_config.cache_dtype,
    }


def run(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return `chosen`, `together` and `alone` (answers by id), `problems` (the tokens of each)."""
    from vllm import LLM

    from vllm_dllm import plugin

    plugin.install()
    llm = LLM(**engine_options(job["case"], job["model"]))
    together = serve(llm.llm_engine, job["requests"])
    alone: dict[str, dict[str, Any]] = {}
    for request in job["requests"]:
        if request["alone"]:
            alone |= serve(llm.llm_engine, [request])
    problems = [
        {"id": str(n), "prompt": prompt, "params": job["problems"]["params"], "stream": False}
        for n, prompt in enumerate(job["problems"]["prompts"])
    ]
    answered = serve(llm.llm_engine, problems)
    return {
        "chosen": chosen(llm),
        "together": together,
        "alone": alone,
        "problems": [answered[problem["id"]]["tokens"] for problem in problems],
    }


def main(argv: Sequence[str]) -> None:
    """Read a job, run it, write the answer, and end."""
    os.environ.update(ENVIRONMENT)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    found = run(json.loads(Path(argv[0]).read_text("utf-8")))
    Path(argv[1]).write_text(json.dumps(found), "utf-8")
    sys.stdout.flush()
    sys.stderr.flush()
    # Shutting an engine down takes seconds; the parent ends what is left of this process's group.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
