"""DiffusionGemma: this package's class, vLLM's own class, and transformers' `generate`.

    .venv/bin/python benchmarks/gemma.py --json benchmarks/results/gemma.json
    .venv/bin/python benchmarks/gemma.py --vocabulary 32768 --repeats 1

One checkpoint (default: `tiny-diffusiongemma`), one machine, one run, one thread. Every canvas
takes the same number of denoise steps (early stopping is switched off), so that all three do
the same work. vLLM compiles both of its models, as it does unless told not to. Tokens per
second at 1, 4 and 16 concurrent requests of equal length, and at 16 of mixed lengths and mixed
numbers of steps, where transformers' lockstep batch waits for its slowest row.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import TINY, child, engines_in_this_process, write  # noqa: E402

engines_in_this_process()  # before torch and vLLM are imported

MODEL = TINY / "tiny-diffusiongemma"
CANVAS, STEPS, PROMPT, REPEATS = 32, 8, 40, 3
KINDS = ("vllm-dllm", "native", "transformers")


@dataclass(frozen=True)
class Job:
    """One request: canvases to write, denoise steps for each."""

    canvases: int
    steps: int


def workloads() -> dict[str, list[Job]]:
    mixed = [Job(1 + n % 4, (2, 4, 8)[n % 3]) for n in range(16)]
    return {f"{n} equal": [Job(2, STEPS)] * n for n in (1, 4, 16)} | {"16 mixed": mixed}


def prompt(n: int) -> list[int]:
    return [15 + (7 * n + 3 * i) % 200 for i in range(PROMPT)]


def prepared(model: Path, scratch: Path) -> Path:
    """The checkpoint with early stopping out of reach."""
    copy = scratch / "model"
    shutil.copytree(model, copy)
    path = copy / "generation_config.json"
    config = json.loads(path.read_text())
    config |= {"max_denoising_steps": STEPS, "confidence_threshold": 1e-30}
    path.write_text(json.dumps(config))
    return copy


def random_model(vocabulary: int, scratch: Path) -> Path:
    """The tiny checkpoint's shape with random weights and another vocabulary."""
    from tests.reference_gemma import random_checkpoint

    path = scratch / "random"
    shape = {"vocab_size": vocabulary, "hidden_size": 128, "num_hidden_layers": 6}
    random_checkpoint(path, 0, canvas=CANVAS, **shape)
    return path


def best(run: Any, jobs: list[Job], repeats: int) -> dict[str, float]:
    """Tokens and denoise steps per second, the best of some repeats behind a warm-up."""
    run(jobs)
    seconds = min(run(jobs) for _ in range(repeats))
    tokens = sum(job.canvases * CANVAS for job in jobs)
    steps = sum(job.canvases * job.steps for job in jobs)
    return {"tokens_per_s": tokens / seconds, "steps_per_s": steps / seconds}


def through_vllm(model: Path) -> Any:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(model),
        dtype="float32",
        max_model_len=512,
        max_num_seqs=16,
        kv_cache_memory_bytes=1 << 27,
        enable_prefix_caching=False,
        limit_mm_per_prompt={"image": 0, "video": 0},
    )

    def run(jobs: list[Job]) -> float:
        params = [
            SamplingParams(
                max_tokens=job.canvases * CANVAS,
                ignore_eos=True,
                extra_args={"diffusion_max_steps": job.steps},
            )
            for job in jobs
        ]
        prompts = [{"prompt_token_ids": prompt(n)} for n in range(len(jobs))]
        begin = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        for job, output in zip(jobs, outputs, strict=True):
            if len(output.outputs[0].token_ids) != job.canvases * CANVAS:
                raise RuntimeError("an answer is too short: the figures would mean nothing")
        return seconds

    return run


def through_transformers(model: Path) -> Any:
    import torch
    from transformers import DiffusionGemmaForBlockDiffusion

    torch.set_num_threads(1)
    network = DiffusionGemmaForBlockDiffusion.from_pretrained(model, dtype=torch.float32)
    network.generation_config.eos_token_id = None

    def run(jobs: list[Job]) -> float:
        ids = torch.tensor([prompt(n) for n in range(len(jobs))])
        begin = time.perf_counter()
        # One lockstep batch: the longest answer and the most steps, for every row.
        network.generate(
            ids,
            max_new_tokens=CANVAS * max(job.canvases for job in jobs),
            max_denoising_steps=max(job.steps for job in jobs),
        )
        return time.perf_counter() - begin

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument(
        "--vocabulary", type=int, help="random weights with so many ids, in place of --model"
    )
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--child", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.child:
        make = through_transformers if args.child == "transformers" else through_vllm
        run = make(args.model)
        print(
            json.dumps({name: best(run, jobs, args.repeats) for name, jobs in workloads().items()})
        )
        return
    with tempfile.TemporaryDirectory() as scratch:
        made = random_model(args.vocabulary, Path(scratch)) if args.vocabulary else args.model
        model = prepared(made, Path(scratch))
        shared = ("--model", str(model), "--repeats", str(args.repeats))
        results: dict[str, dict[str, dict[str, float]]] = {
            kind: child(__file__, "--child", kind, *shared, native=kind == "native")
            for kind in KINDS
        }
    print(f"{'tokens per second':20}" + "".join(f"{kind:>16}" for kind in KINDS))
    for name in workloads():
        figures = [results[kind][name]["tokens_per_s"] for kind in KINDS]
        ours, native, authors = figures
        print(
            f"{name:20}"
            + "".join(f"{value:16.0f}" for value in figures)
            + f"   {ours / native:.2f} x native, {ours / authors:.2f} x transformers"
        )
    write(args.json, "gemma", results)


if __name__ == "__main__":
    main()
