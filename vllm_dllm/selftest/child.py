"""Run one case in a separate process: start an engine, send all requests, write the answers.

    python -m vllm_dllm.selftest.child JOB.json ANSWER.json

A job is a case with a checkpoint and the requests that its golden file lists. The process judges
nothing: the answers go to the parent, which knows what they should be. A process that dies leaves
no answers.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
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
SEATS = 16
LENGTH = 1024


@dataclass
class Answer:
    """The answer to a request.

    Attributes:
        tokens: its token ids.
        parts: the number of pieces in which they were streamed.
        logprobs: for each token the (id, logprob) pairs that were asked for, the likeliest first.
    """

    tokens: list[int] = field(default_factory=list)
    parts: int = 0
    logprobs: list[list[tuple[int, float]]] = field(default_factory=list)


def engine_options(case: dict[str, Any], model: str) -> dict[str, Any]:
    """Options of vLLM's `LLM` for a case (`Case.as_dict`)."""
    options: dict[str, Any] = {
        "model": model,
        "dtype": case["dtype"],
        "max_model_len": LENGTH,
        "max_num_seqs": SEATS,
        "kv_cache_memory_bytes": 1 << 27,
        # vLLM only checks this against the free memory: the line above sets the size of the cache.
        "gpu_memory_utilization": 0.1,
        "kv_cache_dtype": case["cache"],
    }
    settings = {} if case["window"] == "symmetric" else {"window": case["window"]}
    if case["kernels"] != "default":
        settings["kernels"] = case["kernels"]
    if case["fused_commit"] != "default":
        settings["fused_commit"] = case["fused_commit"]
    options["additional_config"] = {"dllm": settings}
    if case["family"] == "diffusion_gemma":
        options["limit_mm_per_prompt"] = {"image": 0, "video": 0}
    if case["scheduling"] != "default":
        options["async_scheduling"] = case["scheduling"] == "async"
    if case["graphs"] == "EAGER":
        options["enforce_eager"] = True
    elif case["graphs"] != "default":
        options["compilation_config"] = {"cudagraph_mode": case["graphs"]}
    attention = {"backend": case["backend"]} if case["backend"] != "default" else {}
    if case["flash"] is not None:
        attention["flash_attn_version"] = case["flash"]
    # The CPU platform has a single backend, which is not requested.
    if attention and case["backend"] != "CPU_ATTN":
        options["attention_config"] = attention
    return options


def sampling(params: dict[str, Any], *, stream: bool) -> Any:
    """Convert the parameters of a golden file to vLLM's `SamplingParams`."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    given = dict(params)
    if "structured_outputs" in given:
        given["structured_outputs"] = StructuredOutputsParams(**given["structured_outputs"])
    kind = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
    return SamplingParams(**given, output_kind=kind)


def serve(engine: Any, requests: Sequence[dict[str, Any]], mark: str) -> dict[str, Answer]:
    """Submit all requests at once, and return their answers by id.

    Args:
        engine: vLLM's `LLMEngine`.
        requests: `id`, `prompt` (token ids), `params`, and `stream` where the answer is streamed.
        mark: makes the requests' names in the engine unique.
    """
    answers = {request["id"]: Answer() for request in requests}
    for request in requests:
        params = sampling(request["params"], stream=request.get("stream", False))
        prompt = {"prompt_token_ids": request["prompt"]}
        engine.add_request(f"{mark} {request['id']}", prompt, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            answer = answers[output.request_id.split(" ", 1)[1]]
            (one,) = output.outputs
            answer.tokens += one.token_ids
            answer.parts += bool(one.token_ids)
            answer.logprobs += [
                sorted(
                    ((token, info.logprob) for token, info in place.items()),
                    key=lambda pair: (-pair[1], pair[0]),
                )
                for place in one.logprobs or []
            ]
    return answers


def memory() -> dict[str, int]:
    """Bytes in use: on a GPU, by this process's tensors there (the peak), and by this process."""
    import torch

    status = Path("/proc/self/status").read_text().splitlines()
    resident = next(line.split()[1] for line in status if line.startswith("VmRSS"))
    found = {"resident": 1024 * int(resident)}
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        found |= {"device": total - free, "tensors_most": torch.cuda.max_memory_allocated()}
    return found


def chosen(llm: Any) -> dict[str, Any]:
    """What the engine serves with, as its own objects say."""
    config = llm.llm_engine.vllm_config
    core = llm.llm_engine.engine_core.engine_core
    state = core.model_executor.driver_worker.worker.model_runner.model_state
    from vllm_dllm.attention.served_route import layer_backends

    layers = layer_backends(config)
    versions = {layer.flash_version for layer in layers if layer.flash_version}
    mode = config.compilation_config.cudagraph_mode
    return {
        "backend": ", ".join(sorted({layer.name for layer in layers})),
        "flash": max(versions, default=None),
        "graphs": "EAGER" if config.model_config.enforce_eager else mode.name,
        "kernels": "triton" if "triton" in type(state.readout).__module__ else "torch",
        "scheduling": "async" if config.scheduler_config.async_scheduling else "sync",
        "commits": commits(state),
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "cache": config.cache_config.cache_dtype,
        "seats": config.scheduler_config.max_num_seqs,
        "budget": config.scheduler_config.max_num_batched_tokens,
    }


def commits(state: Any) -> str:
    """How a model state commits blocks, in `commit_choice`'s terms."""
    from vllm_dllm.startup.commit_choice import GRANTED, SEPARATE, TWO_BLOCKS

    if state.slots.window is not None:
        return TWO_BLOCKS
    return GRANTED if state.policy.fused else SEPARATE


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Do everything that a job asks for; see `vllm_dllm.selftest.golden` for the golden file.

    Returns:
        `chosen`, `seconds`, `memory` (before, started, after), `together` and `alone` (answers by
        request id), `problems` (one list of tokens for each problem).
    """
    requests, problems = job["requests"], job["problems"]
    begin = time.perf_counter()
    from vllm import LLM

    from vllm_dllm import plugin

    plugin.install()
    seconds = {"import": time.perf_counter() - begin}
    used = {"before": memory()}
    begin = time.perf_counter()
    llm = LLM(**engine_options(job["case"], job["model"]))
    seconds["start"] = time.perf_counter() - begin
    used["started"] = memory()
    begin = time.perf_counter()
    together = serve(llm.llm_engine, requests, "together")
    alone: dict[str, Answer] = {}
    for request in requests:
        if request["alone"]:
            alone |= serve(llm.llm_engine, [request], "alone")
    seconds["requests"] = time.perf_counter() - begin
    begin = time.perf_counter()
    answered = serve(llm.llm_engine, problems, "problem")
    seconds["problems"] = time.perf_counter() - begin
    used["after"] = memory()
    return {
        "chosen": chosen(llm),
        "seconds": seconds,
        "memory": used,
        "together": {name: vars(answer) for name, answer in together.items()},
        "alone": {name: vars(answer) for name, answer in alone.items()},
        "problems": [answered[problem["id"]].tokens for problem in problems],
    }


def main(argv: Sequence[str]) -> None:
    """Read a job, run it, write the answer, and end."""
    os.environ.update(ENVIRONMENT)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    job, place = json.loads(Path(argv[0]).read_text("utf-8")), Path(argv[1])
    if job.get("bench"):
        from vllm_dllm.selftest import bench

        found = bench.run(job)
    else:
        found = run(job)
    place.write_text(json.dumps(found), "utf-8")
    sys.stdout.flush()
    sys.stderr.flush()
    # Shutting an engine down takes seconds; the parent ends what is left of this process's group.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
