"""``vllm bench serve`` against ``vllm serve``: latency and throughput at several concurrencies.

    .venv/bin/python benchmarks/serve.py --concurrency 1 4 16 64 --json out.json
    .venv/bin/python benchmarks/serve.py --systems llada2 causal
    .venv/bin/python benchmarks/serve.py --systems llada2 llada2-one-pass --rates 12 22

Each system is a real server on loopback that vLLM's own benchmark drives. vLLM compiles the models
unless ``--eager`` is given. All servers are up at the same time and take turns, so that a slow
minute of the machine slows all of them; figures are medians of the turns. The systems are:

    llada2          this package, tiny-llada2
    causal          vLLM's autoregressive serving of its weights: what a user would pick instead
    sdar            this package, tiny-sdar
    gemma           this package, tiny-diffusiongemma, with 8 denoise steps for every canvas
    ...-one-pass    the same with one pass in each step of vLLM
    gemma-native    vLLM's own class for the same
    gemma-native-8  that class with 8 requests in a step, the most that it takes unless asked
                    otherwise; the others may take 64

The prompts are held-out problems of `examples/tiny/tasks.py`, with 64 output tokens for each. All
systems generate the same number of tokens. The causal one generates nonsense, because its weights
were trained with bidirectional attention; only its speed matters. With ``--rates`` requests arrive
at random, so many a second on average, instead of keeping a number in flight.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import with_equal_steps, write  # noqa: E402
from examples.tiny.tasks import TASKS, problems  # noqa: E402
from tests.support.checkpoints import TEXT_ONLY_FLAGS, TINY_GEMMA, TINY_LLADA2, TINY_SDAR  # noqa: E402
from tests.support.server import Server  # noqa: E402

OUTPUT = 64  # tokens
# Names in the benchmark's result file -> how they are printed.
FIGURES = {
    "output_throughput": "tokens/s",
    "median_ttft_ms": "first tokens, median ms",
    "p99_ttft_ms": "first tokens, 99th percentile ms",
    "mean_tpot_ms": "per token, mean ms",
    "median_e2el_ms": "request, median ms",
    "p99_e2el_ms": "request, 99th percentile ms",
    "diffusion_steps_per_canvas": "steps per canvas",
    "diffusion_committed_per_step": "tokens per step",
}


@dataclass(frozen=True)
class System:
    """A served system: the checkpoint, and the server's flags and environment."""

    model: Path
    flags: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    steps: int | None = None  # of every canvas; None: as many as it takes
    at_once: int = 64  # most requests in a step

    def at(self, scratch: Path) -> System:
        """This system with a copy of the checkpoint that fixes the number of steps."""
        if self.steps is None:
            return self
        return replace(self, model=with_equal_steps(self.model, scratch, self.steps))


AS_CAUSAL = '{"architectures": ["BailingMoeV2ForCausalLM"], "canvas_length": null}'
CAUSAL = ("--hf-overrides", AS_CAUSAL)
GEMMA = TINY_GEMMA
NATIVE = System(GEMMA, TEXT_ONLY_FLAGS, {"VLLM_DLLM_NATIVE": "1"}, steps=8)
SYSTEMS = {
    "llada2": System(TINY_LLADA2),
    "sdar": System(TINY_SDAR),
    "gemma": System(GEMMA, TEXT_ONLY_FLAGS, steps=8),
    "causal": System(TINY_LLADA2, CAUSAL),
    "gemma-native": NATIVE,
    "gemma-native-8": replace(NATIVE, at_once=8),
}
ONE_PASS = ("--additional-config", '{"dllm": {"passes_per_step": 1}}')
SYSTEMS |= {
    f"{name}-one-pass": replace(SYSTEMS[name], flags=(*SYSTEMS[name].flags, *ONE_PASS))
    for name in ("llada2", "sdar", "gemma")
}
TABLE = ("llada2", "causal", "gemma", "gemma-native", "gemma-native-8")  # of docs/performance.md


def bench(
    server: Server, system: System, load: float, prompts: Path, arrive: bool
) -> dict[str, Any]:
    """One run of ``vllm bench serve`` over all prompts; its result file as a mapping.

    `load` is how many requests are in flight, or with `arrive` how many arrive in a second.
    """
    vllm, scratch = str(Path(sys.executable).with_name("vllm")), prompts.parent
    command = [
        *(vllm, "bench", "serve", "--backend", "openai", "--base-url", server.url),
        *("--endpoint", "/v1/completions", "--model", "m", "--tokenizer", str(system.model)),
        *("--dataset-name", "custom", "--dataset-path", str(prompts), "--skip-chat-template"),
        *("--custom-output-len", str(OUTPUT), "--num-prompts", str(lines_of(prompts))),
        *("--request-rate" if arrive else "--max-concurrency", str(load)),
        *("--ignore-eos", "--disable-shuffle"),
        *("--num-warmups", str(int(min(load, 4))), "--disable-tqdm", "--seed", "0"),
        *("--percentile-metrics", "ttft,tpot,e2el", "--metric-percentiles", "99"),
        *("--save-result", "--result-dir", str(scratch), "--result-filename", "result.json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    if done.returncode:
        raise RuntimeError(f"vllm bench serve failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    result = json.loads((scratch / "result.json").read_text())
    if result["completed"] != lines_of(prompts) or result["failed"]:
        raise RuntimeError(f"{result['failed']} of {lines_of(prompts)} requests failed")
    return {key: result.get(key) for key in FIGURES}


def lines_of(file: Path) -> int:
    return len(file.read_text().splitlines())


def write_prompts(file: Path, count: int) -> None:
    """Held-out problems in the form that ``vllm bench serve`` reads."""
    streams = [problems(task, seed=0, test=True) for task in TASKS]
    chosen = islice((problem for row in zip(*streams, strict=False) for problem in row), count)
    file.write_text("".join(json.dumps({"prompt": problem.prompt}) + "\n" for problem in chosen))


def measure(args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Figures of each system by concurrency; the servers are started and stopped here."""
    systems = {name: SYSTEMS[name].at(scratch / name) for name in args.systems}
    with ExitStack() as stack:
        servers = {
            name: server_of(system, scratch / f"{name}.log", args.eager)
            for name, system in systems.items()
        }
        start(list(servers.values()), stack)
        results: dict[str, dict[str, Any]] = {name: {} for name in servers}
        for load in args.rates or args.concurrency:
            prompts = scratch / "prompts.jsonl"
            write_prompts(prompts, max(args.least, int(args.rounds * load)))
            turns: dict[str, list[dict[str, Any]]] = {name: [] for name in servers}
            for _ in range(args.turns):
                for name, server in servers.items():
                    figures = bench(server, systems[name], load, prompts, bool(args.rates))
                    turns[name].append(figures)
                    speed = figures["output_throughput"]
                    print(f"{name}: {speed:.0f} tokens/s at {load}", file=sys.stderr)
            for name, samples in turns.items():
                results[name][str(load)] = median_of(samples)
    return results


def start(servers: list[Server], stack: ExitStack) -> None:
    """Start servers, two at a time, because importing vLLM takes a core. The stack stops them."""
    for number, server in enumerate(servers):
        server.launch()
        stack.callback(server.stop)
        if number:
            servers[number - 1].wait_until_ready()
    servers[-1].wait_until_ready()


def server_of(system: System, log: Path, eager: bool) -> Server:
    """The server of a system, not started yet."""
    flags = [
        *("--max-num-seqs", str(system.at_once), "--kv-cache-memory-bytes", str(1 << 28)),
        *("--enforce-eager" if eager else "--no-enforce-eager", *system.flags),
    ]
    return Server(system.model, *flags, log=log, env=system.env, start_seconds=600)


def median_of(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of each figure, and the throughput of every turn."""
    medians: dict[str, Any] = {"turns": [sample["output_throughput"] for sample in samples]}
    for key in FIGURES:
        values = [sample[key] for sample in samples if sample[key] is not None]
        medians[key] = median(values) if values else None
    return medians


def show(results: dict[str, Any]) -> None:
    """Print a table for each figure that any system has."""
    for key, title in FIGURES.items():
        print(title)
        for name, by_concurrency in results.items():
            values = [(n, r[key]) for n, r in by_concurrency.items()]
            cells = "".join(f"{'-' if v is None else f'{v:.2f}':>12} @{n}" for n, v in values)
            print(f"  {name:14}{cells}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--systems", nargs="+", default=TABLE, choices=SYSTEMS)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--rates", type=float, nargs="+", help="requests a second, at random")
    parser.add_argument("--least", type=int, default=24, help="requests of a run, at least")
    parser.add_argument("--rounds", type=int, default=3, help="requests for each at a time")
    parser.add_argument("--turns", type=int, default=3, help="runs of each system")
    parser.add_argument("--eager", action="store_true", help="nothing compiled, for quick starts")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        results = measure(args, Path(name))
    show(results)
    write(args.json, "serve", results)


if __name__ == "__main__":
    main()
