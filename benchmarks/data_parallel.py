"""Replicas on two "nodes" of one machine: how many answers are those of one plain engine.

    .venv/bin/python benchmarks/data_parallel.py --model llada2 --json out.json
    .venv/bin/python benchmarks/data_parallel.py --model gemma --layouts headless --requests 100

Each node is a `vllm serve` with processes of its own, and all traffic is on loopback. The requests
are greedy or sampled with a seed, of every algorithm of the model and of many lengths; one in six
has a constraint, and every other one is streamed. One plain server answers all of them first. If an
answer differs, or a rank had nothing to do, the exit status is 1. Layouts and requests are in
`tests/support/replicas.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import write  # noqa: E402
from tests.support.replicas import (  # noqa: E402
    LAYOUTS,
    MODELS,
    Replicated,
    ask_all,
    compared,
    mixed,
    replicas,
)
from tests.support.server import AS_SERVED, Server  # noqa: E402
from tests.support.soak.client import Outcome  # noqa: E402
from tests.support.soak.requests import Sending  # noqa: E402

MOST_SHOWN = 5


def kinds(sendings: Sequence[Sending]) -> dict[str, int]:
    """How many of the requests are of each kind."""
    counted: Counter[str] = Counter()
    for sending in sendings:
        counted["greedy" if sending.ask.body["temperature"] == 0 else "sampled"] += 1
        counted["streamed"] += sending.stream
        counted["constrained"] += "structured_outputs" in sending.ask.body
    return dict(counted)


def plain(
    model: Replicated, sendings: Sequence[Sending], at_once: int, folder: Path
) -> tuple[list[Outcome], float]:
    """The outcomes of one plain engine, and the seconds that they took."""
    with Server(
        model.path, *model.flags, log=folder / "plain.log", env=AS_SERVED, start_seconds=400
    ) as server:
        begin = time.monotonic()
        outcomes = asyncio.run(ask_all([server], sendings, at_once))
        return outcomes, time.monotonic() - begin


def measured(
    model: Replicated, layout: str, alone: Sequence[Outcome], at_once: int, folder: Path
) -> dict[str, Any]:
    """The figures of a layout."""
    sendings = [outcome.sending for outcome in alone]
    (folder / layout).mkdir()
    with replicas(model, LAYOUTS[layout], folder / layout) as running:
        begin = time.monotonic()
        outcomes = asyncio.run(ask_all(running.front_ends, sendings, at_once))
        seconds = time.monotonic() - begin
        served = running.served()
    found = compared(outcomes, alone)
    print("\n".join(found.different[:MOST_SHOWN]))
    return {
        "ranks": LAYOUTS[layout].ranks,
        "equal": found.equal,
        "served": {str(rank): count for rank, count in sorted(served.items())},
        "seconds": round(seconds, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="llada2")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    model = MODELS[args.model]
    sendings = mixed(args.requests, model.corruption)
    results: dict[str, Any] = {
        "model": args.model,
        "requests": args.requests,
        "at_once": args.at_once,
        "kinds": kinds(sendings),
        "layouts": {},
    }
    with tempfile.TemporaryDirectory(prefix="vllm-dllm-replicas-") as name:
        alone, seconds = plain(model, sendings, args.at_once, Path(name))
        results["alone_seconds"] = round(seconds, 1)
        print(f"{args.model}: {len(alone)} answers of one engine in {seconds:.0f} s", flush=True)
        for layout in args.layouts:
            figures = measured(model, layout, alone, args.at_once, Path(name))
            results["layouts"][layout] = figures
            print(f"{layout}: {figures}", flush=True)
            write(args.json, "data_parallel", results)  # each time, because each takes minutes
    every = results["layouts"].values()
    right = all(
        one["equal"] == args.requests
        and len(one["served"]) == one["ranks"]
        and min(one["served"].values()) > 0
        for one in every
    )
    return 0 if right and len(alone) == args.requests else 1


if __name__ == "__main__":
    sys.exit(main())
