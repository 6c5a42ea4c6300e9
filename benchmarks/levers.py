"""What each lever on the number of passes does to answers and speed, on the tiny models.

    .venv/bin/python benchmarks/levers.py --json benchmarks/results/levers.json

A lever is a setting of `benchmarks/accuracy.py`. All levers of a model answer the same held-out
problems, 16 at a time, through the engine as it is served. A pass is one forward pass over a canvas
of one request, commits included; one that reads two blocks or verifies a draft counts as one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.accuracy import Setting, measure  # noqa: E402
from benchmarks.common import write  # noqa: E402
from benchmarks.tables import levers, markdown  # noqa: E402
from examples.tiny.tasks import held_out_set  # noqa: E402
from tests.support.checkpoints import TINY, TINY_GEMMA  # noqa: E402

DEFAULT: dict[str, Any] = {}


def request(**options: Any) -> dict[str, dict[str, Any]]:
    """A lever that a request can ask for."""
    return {"request": {f"diffusion_{name}": value for name, value in options.items()}}


LEVERS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "tiny-llada2": {
        "default: LowConfidence 0.95": DEFAULT,
        "one position a pass": request(threshold=1.0),
        "LowConfidence 0.5": request(threshold=0.5),
        "threshold under load, 0.95 to 0.5 at 16": {
            "server": {"threshold_under_load": {"from": 0.95, "to": 0.5, "at_requests": 16}}
        },
    },
    "tiny-llada2-blocks": {
        "default: LowConfidence 0.95": DEFAULT,
        "LowConfidence 0.9": request(threshold=0.9),
        "4 blocks": {"server": {"blocks": 4}},
        "4 blocks, open at 0": {"server": {"blocks": 4, "blocks_open_at": 0}},
    },
    "tiny-sdar": {
        "default: LowConfidenceDynamic 0.9": DEFAULT,
        "LowConfidenceDynamic 0.7": request(threshold=0.7),
        "4 blocks": {"server": {"blocks": 4}},
    },
    "tiny-diffusiongemma": {
        "default: EntropyBound 0.1": DEFAULT,
        "at most 8 steps": request(max_steps=8),
    },
}


def settings(model: str) -> list[Setting]:
    """A model's levers as settings. All but DiffusionGemma's are greedy."""
    sampling = {} if model == TINY_GEMMA.name else {"temperature": 0.0}
    return [
        Setting(name, lever.get("server", {}), lever.get("request", {}), sampling)
        for name, lever in LEVERS[model].items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=LEVERS, default=[*LEVERS])
    parser.add_argument("--per-task", type=int, default=100, help="problems of each task")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    args.http, args.concurrency, args.dtype, args.compiled = False, 16, "float32", True
    problems = held_out_set(args.per_task, 0)
    results = {}
    for model in args.models:
        args.setting = settings(model)
        results[model] = measure(str(TINY / model), args, problems)
        for result in results[model].values():
            del result["answers"], result["tokens"]
        write(args.json, f"levers, {len(problems)} problems", results)  # the next may fail
    print("\n".join(markdown(levers(results))))


if __name__ == "__main__":
    main()
