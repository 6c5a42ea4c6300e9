"""``vllm bench serve`` against ``vllm serve``: throughput and latency at a few concurrencies.

    .venv/bin/python benchmarks/serving.py --concurrency 1 4

Starts one server on loopback, runs vLLM's own benchmark against it for each concurrency and
prints its figures with the diffusion statistics. Prompts are random tokens, 40 in and 64 out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import write  # noqa: E402
from examples.demo import serve  # noqa: E402
from examples.tiny.make_twin import make_twin  # noqa: E402

# Names in the benchmark's result file -> how they are printed.
FIGURES = {
    "output_throughput": "tokens/s",
    "mean_ttft_ms": "first block, mean ms",
    "median_e2el_ms": "request, median ms",
    "diffusion_committed_per_step": "tokens per step",
    "diffusion_steps_per_canvas": "steps per block",
    "completed": "requests",
}


def bench(url: str, model: str, concurrency: int, prompts: int, scratch: Path) -> dict[str, Any]:
    """One run of ``vllm bench serve``; its result file as a mapping."""
    vllm = str(Path(sys.executable).with_name("vllm"))
    command = [
        *(vllm, "bench", "serve", "--backend", "openai", "--base-url", url),
        *("--endpoint", "/v1/completions", "--model", "demo", "--tokenizer", model),
        *("--dataset-name", "random", "--random-input-len", "40", "--random-output-len", "64"),
        *("--num-prompts", str(prompts), "--max-concurrency", str(concurrency)),
        *("--ignore-eos", "--seed", "0", "--num-warmups", "2", "--disable-tqdm"),
        *("--percentile-metrics", "ttft,e2el"),
        *("--save-result", "--result-dir", str(scratch), "--result-filename", "result.json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        raise RuntimeError(f"vllm bench serve failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    print(done.stdout[done.stdout.index("====") :], flush=True)
    return json.loads((scratch / "result.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="checkpoint; default: the seeded twin of examples/tiny")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--prompts", type=int, default=32, help="requests per run")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        model = args.model or str(make_twin(scratch / "twin"))
        with serve(model) as url:
            results = {n: bench(url, model, n, args.prompts, scratch) for n in args.concurrency}
    kept = {n: {key: r.get(key) for key in FIGURES} for n, r in results.items()}
    for key, name in FIGURES.items():
        print(f"{name:24}" + "".join(f"{r[key] or 0:12.2f} @{n}" for n, r in kept.items()))
    write(args.json, "serving", {str(n): r for n, r in kept.items()})


if __name__ == "__main__":
    main()
