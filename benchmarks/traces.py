"""What a trace costs: a steady denoise step of 16 requests with traces and without.

    .venv/bin/python benchmarks/traces.py --json benchmarks/results/traces.json

All kinds take turns in one engine for each checkpoint, in this process. The step is measured in
processor time, which other processes hardly disturb, and the result is the median of the rounds'
ratios. With a step of a tiny model it is an upper bound: the work of a trace grows with requests
and canvases, that of a step with the model, too.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import engines_in_this_process, write  # noqa: E402

engines_in_this_process()  # before torch and vLLM are imported

from benchmarks.step_time import step  # noqa: E402

TINY = ROOT / "examples" / "tiny" / "checkpoints"
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "trace": {"diffusion_trace": True},
    "logprobs": {},
}
COMPILED = {"enforce_eager": False}  # vLLM's default
TEXT_ONLY = {"limit_mm_per_prompt": {"image": 0, "video": 0}}
# Checkpoint, temperature, options that let no canvas finish early, options of the engine.
CASES: dict[str, tuple[str, float, dict[str, float], dict[str, Any]]] = {
    "tiny-llada2, greedy": ("tiny-llada2", 0.0, {"diffusion_threshold": 2.0}, {}),
    "tiny-llada2, drawn": ("tiny-llada2", 0.7, {"diffusion_threshold": 2.0}, {}),
    "tiny-llada2, greedy, compiled": ("tiny-llada2", 0.0, {"diffusion_threshold": 2.0}, COMPILED),
    "tiny-sdar, greedy": ("tiny-sdar", 0.0, {"diffusion_threshold": 1.0}, {}),
    "tiny-sdar, greedy, compiled": ("tiny-sdar", 0.0, {"diffusion_threshold": 1.0}, COMPILED),
    "tiny-diffusiongemma, drawn": (
        "tiny-diffusiongemma",
        1.0,
        {"diffusion_confidence_threshold": 1e-9},
        TEXT_ONLY,
    ),
}


def step_ms(llm: Any, case: str, kind: str, requests: int, steps: int) -> float:
    """Median processor time of a step in which nothing leaves, in milliseconds."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    core = engine.engine_core.engine_core
    _, temperature, endless, _ = CASES[case]
    params = SamplingParams(
        temperature=temperature,
        max_tokens=512,
        ignore_eos=True,
        seed=1,
        extra_args=endless | OPTIONS[kind],
        logprobs=0 if kind == "logprobs" else None,
    )
    for i in range(requests):
        ids = [3 + (7 * i + j) % 200 for j in range(64)]
        engine.add_request(f"{kind}-{i}", {"prompt_token_ids": ids}, params)
    times: list[float] = []
    while len(times) < steps:
        begin = time.process_time()
        if step(core):
            times.append(1e3 * (time.process_time() - begin))
    engine.abort_request([f"{kind}-{i}" for i in range(requests)])
    step(core)
    return statistics.median(times[steps // 5 :])


def measure(case: str, args: argparse.Namespace) -> dict[str, Any]:
    """Step times of each kind by round, and the median ratios to those of a plain step."""
    from vllm import LLM

    name, _, _, options = CASES[case]
    llm = LLM(
        str(TINY / name),
        max_model_len=1024,
        max_num_seqs=args.requests,
        kv_cache_memory_bytes=1 << 28,
        **({"enforce_eager": True} | options),
    )
    rounds = [
        {kind: step_ms(llm, case, kind, args.requests, args.steps) for kind in OPTIONS}
        for _ in range(args.rounds + 1)
    ][1:]
    llm.llm_engine.engine_core.shutdown()
    found: dict[str, Any] = {"requests": args.requests, "rounds": rounds}
    for kind in OPTIONS:
        ratio = statistics.median(each[kind] / each["plain"] for each in rounds)
        found[kind] = {"ms": statistics.median(each[kind] for each in rounds), "ratio": ratio}
        print(f"{case:29} {kind:9} {found[kind]['ms']:6.2f} ms {100 * (ratio - 1):+5.1f} %")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--steps", type=int, default=100, help="of each kind in a round")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    write(args.json, "traces", {case: measure(case, args) for case in CASES})


if __name__ == "__main__":
    main()
