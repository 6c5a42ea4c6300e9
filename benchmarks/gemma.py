"""DiffusionGemma: this package's class, vLLM's own class, and transformers' `generate`.

    .venv/bin/python benchmarks/gemma.py --json benchmarks/results/gemma.json
    .venv/bin/python benchmarks/gemma.py --vocabulary 32768 --rounds 1

All three run one checkpoint (default: `tiny-diffusiongemma`) on one machine with one thread each.
They take turns, so that each ratio compares runs of about the same time. Every canvas takes the
same number of denoise steps (early stopping is switched off), so that all three do the same work.
vLLM compiles both of its models, which is its default.

The figures are tokens per second at 1, 4 and 16 concurrent requests of equal length, and at 16 of
mixed lengths and mixed numbers of steps, where transformers' lockstep batch waits for its slowest
row. They include the share of the time that the model's forward takes, which both of vLLM's classes
have in common.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import engines_in_this_process, environment, with_equal_steps, write  # noqa: E402

engines_in_this_process()  # before torch and vLLM are imported

from tqdm import tqdm  # noqa: E402

from benchmarks.step_time import Stopwatch  # noqa: E402
from benchmarks.tables import gemma_side  # noqa: E402
from tests.support.checkpoints import TEXT_ONLY_OPTIONS, TINY_GEMMA  # noqa: E402

MODEL = TINY_GEMMA
CANVAS, STEPS, PROMPT, ROUNDS = 32, 8, 40, 5
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


def random_model(vocabulary: int, scratch: Path) -> Path:
    """The tiny checkpoint's shape with random weights and another vocabulary."""
    from tests.support.reference_gemma import random_checkpoint

    path = scratch / "random"
    shape = {"vocab_size": vocabulary, "hidden_size": 128, "num_hidden_layers": 6}
    random_checkpoint(path, 0, canvas=CANVAS, **shape)
    return path


# From jobs to their seconds, and the seconds that the model's forward took (0: not measured).
Run = Callable[[list[Job]], tuple[float, float]]


def through_vllm(model: Path) -> Run:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(model),
        dtype="float32",
        max_model_len=512,
        max_num_seqs=16,
        kv_cache_memory_bytes=1 << 27,
        enable_prefix_caching=False,
        **TEXT_ONLY_OPTIONS,
    )

    watch = Stopwatch()
    core = llm.llm_engine.engine_core.engine_core
    watch.wrap(core.model_executor.driver_worker.worker.model_runner.model, "forward", "forward")

    def run(jobs: list[Job]) -> tuple[float, float]:
        watch.current.clear()
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
        return seconds, watch.current["forward"]

    return run


def through_transformers(model: Path) -> Run:
    import torch
    from transformers import DiffusionGemmaForBlockDiffusion

    torch.set_num_threads(1)
    network = DiffusionGemmaForBlockDiffusion.from_pretrained(model, dtype=torch.float32)
    network.generation_config.eos_token_id = None

    def run(jobs: list[Job]) -> tuple[float, float]:
        ids = torch.tensor([prompt(n) for n in range(len(jobs))])
        begin = time.perf_counter()
        # In one lockstep batch every row has the longest answer and the most steps.
        network.generate(
            ids,
            max_new_tokens=CANVAS * max(job.canvases for job in jobs),
            max_denoising_steps=max(job.steps for job in jobs),
        )
        return time.perf_counter() - begin, 0.0

    return run


class Peer:
    """A process that holds one of the three, and runs a workload when it is sent the name."""

    def __init__(self, kind: str, model: Path, scratch: Path) -> None:
        self.errors = scratch / f"{kind}.log"
        command = [sys.executable, __file__, "--child", kind, "--model", str(model)]
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment(kind == "native"),
            )

    def __call__(self, name: str) -> tuple[float, float]:
        """Seconds, and how many of them were the model's forward.

        Raises:
            RuntimeError: the process has ended.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{name}\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("["):
                seconds, forward = json.loads(line)
                return seconds, forward
        raise RuntimeError(f"a peer has ended:\n{self.errors.read_text()[-2000:]}")

    def close(self) -> None:
        """End the process."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.wait()


def serve(kind: str, model: Path) -> None:
    """The other end of `Peer`."""
    run = through_transformers(model) if kind == "transformers" else through_vllm(model)
    for name in sys.stdin:
        print(json.dumps(run(workloads()[name.strip()])), flush=True)


def in_turns(peers: Mapping[str, Peer], rounds: int) -> dict[str, dict[str, list[Any]]]:
    """(seconds, seconds of the forward) by peer and workload, for each round after a warm-up.

    The peers take turns in a round, so that other work on the machine slows down all of them.
    """
    samples: dict[str, dict[str, list[Any]]] = {kind: {} for kind in peers}
    for name in tqdm(workloads(), desc="workloads", leave=False):
        for number in range(1 + rounds):
            for kind, peer in peers.items():
                sample = peer(name)
                if number:
                    samples[kind].setdefault(name, []).append(sample)
    return samples


def figures(samples: Mapping[str, Mapping[str, list[Any]]]) -> dict[str, Any]:
    """For each peer: its best tokens and steps per second, and the forward's share of the time.

    They include how many times as fast we are as each peer, the median of the rounds' ratios.
    """
    results: dict[str, Any] = {kind: {} for kind in samples}
    for name, jobs in workloads().items():
        tokens = sum(job.canvases * CANVAS for job in jobs)
        steps = sum(job.canvases * job.steps for job in jobs)
        ours = [seconds for seconds, _ in samples[KINDS[0]][name]]
        for kind, by_name in samples.items():
            seconds = [all_of_it for all_of_it, _ in by_name[name]]
            shares = [forward / all_of_it for all_of_it, forward in by_name[name]]
            rounds = [
                theirs / our_seconds for theirs, our_seconds in zip(seconds, ours, strict=True)
            ]
            results[kind][name] = {
                "tokens_per_s": tokens / min(seconds),
                "steps_per_s": steps / min(seconds),
                "forward_share": median(shares) or None,
                "times_as_fast": median(rounds),
                "samples_s": seconds,
            }
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument(
        "--vocabulary", type=int, help="random weights with so many ids, in place of --model"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--child", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.child:
        serve(args.child, args.model)
        return
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = random_model(args.vocabulary, Path(scratch)) if args.vocabulary else args.model
        model = with_equal_steps(checkpoint, Path(scratch) / "model", STEPS)
        peers = {kind: Peer(kind, model, Path(scratch)) for kind in KINDS}
        try:
            results = figures(in_turns(peers, args.rounds))
        finally:
            for peer in peers.values():
                peer.close()
    for row in gemma_side(results):
        print("".join(f"{cell:>24}" for cell in row))
    write(args.json, "gemma", results)


if __name__ == "__main__":
    main()
