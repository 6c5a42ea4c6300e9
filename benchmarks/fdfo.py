"""What waiting costs: execution mode `fdfo` (first done, first out) against `sync` (lockstep).

    .venv/bin/python benchmarks/fdfo.py --json benchmarks/results/fdfo.json

Both modes answer the same held-out problems with the same model and a given number of requests at a
time; the next request enters when one has left. The benchmark prints tokens per second,
request-steps (forward passes of a canvas), the median and 99th percentile of the latency, and exact
match with its 95 % interval. The request-steps that `sync` takes beyond those of `fdfo` are wasted:
they are passes over finished canvases.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import in_flight, mixed_problems, quiet_engines, write  # noqa: E402

quiet_engines()  # before torch and vLLM are imported

from tqdm import tqdm  # noqa: E402

from examples.tiny.tasks import Problem  # noqa: E402
from tests.support.checkpoints import TINY_LLADA2  # noqa: E402
from tests.support.statistics import wilson_interval  # noqa: E402

MODEL = TINY_LLADA2
MODES = ("sync", "fdfo")
STEPS = "vllm:diffusion_num_denoising_steps"
MAX_TOKENS = 64


@dataclass
class Measured:
    """Measurements of one mode at one concurrency."""

    seconds: float = 0.0
    tokens: int = 0
    steps: float = 0.0
    right: int = 0
    latencies: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        """The figures that are printed and written."""
        ordered = sorted(self.latencies)
        total = len(ordered)
        return {
            "tokens_per_second": self.tokens / self.seconds,
            "request_steps": self.steps,
            "p50_s": statistics.median(ordered),
            "p99_s": ordered[min(total - 1, int(0.99 * total))],
            "right": self.right,
            "of": total,
            "interval": wilson_interval(self.right, total),
        }


def measure(llm: Any, problems: Sequence[Problem], concurrency: int) -> Measured:
    """Answer all problems, `concurrency` at a time."""
    engine, tokenizer = llm.llm_engine, llm.get_tokenizer()
    params = llm.get_default_sampling_params()
    params.max_tokens = MAX_TOKENS
    measured = Measured()
    texts = (
        tokenizer.apply_chat_template(
            [{"role": "user", "content": problem.prompt}],
            tokenize=False,
            add_generation_prompt=True,
        )
        for problem in problems
    )
    before, begin = counted(llm), time.monotonic()
    with tqdm(total=len(problems), unit="problem", leave=False) as bar:
        for number, seconds, output in in_flight(engine, texts, params, concurrency):
            measured.latencies.append(seconds)
            answer = output.outputs[0]
            measured.tokens += len(answer.token_ids)
            measured.right += answer.text == problems[number].answer
            bar.update()
    measured.seconds = time.monotonic() - begin
    measured.steps = counted(llm) - before
    return measured


def counted(llm: Any) -> float:
    """Number of forward passes of canvases so far."""
    return sum(metric.value for metric in llm.get_metrics() if metric.name == STEPS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--concurrency", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--per-task", type=int, default=100, help="problems of each task")
    parser.add_argument("--threshold", type=float, default=0.9)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    from vllm import LLM

    problems = mixed_problems(args.per_task)
    results: dict[str, dict[str, Any]] = {}
    for mode in MODES:
        llm = LLM(
            model=args.model,
            dtype="float32",
            enforce_eager=True,
            max_model_len=1024,
            max_num_seqs=max(args.concurrency),
            kv_cache_memory_bytes=1 << 28,
            disable_log_stats=False,
            enable_prefix_caching=False,
            additional_config={"dllm": {"execution": mode, "threshold": args.threshold}},
        )
        measure(llm, problems[:64], max(args.concurrency))  # warm up
        for concurrency in args.concurrency:
            figures = measure(llm, problems, concurrency).figures()
            results.setdefault(str(concurrency), {})[mode] = figures
        llm.llm_engine.engine_core.shutdown()
        del llm
    show(results)
    write(args.json, "fdfo", results)


def show(results: dict[str, dict[str, Any]]) -> None:
    """Print a line for each mode and concurrency."""
    print(
        f"{'requests':>8}  {'mode':6}{'tokens/s':>10}{'steps':>8}{'wasted':>8}"
        f"{'p50 s':>8}{'p99 s':>8}{'exact match':>13}{'interval':>18}"
    )
    for concurrency, modes in results.items():
        least = modes["fdfo"]["request_steps"]
        for mode, figures in modes.items():
            low, high = (100 * bound for bound in figures["interval"])
            rate = 100 * figures["right"] / figures["of"]
            print(
                f"{concurrency:>8}  {mode:6}{figures['tokens_per_second']:10.0f}"
                f"{figures['request_steps']:8.0f}{figures['request_steps'] - least:8.0f}"
                f"{figures['p50_s']:8.3f}{figures['p99_s']:8.3f}{rate:11.1f} %"
                f"    [{low:5.1f}, {high:5.1f}]"
            )
        gain = modes["fdfo"]["tokens_per_second"] / modes["sync"]["tokens_per_second"]
        print(f"{concurrency:>8}  fdfo is {gain:.2f}x of sync")


if __name__ == "__main__":
    main()
