"""A simulated router in front of replicas on H200s, and a check of the simulation on a CPU.

    .venv/bin/python benchmarks/router_simulation.py --json benchmarks/results/router.json
    .venv/bin/python benchmarks/router_simulation.py --check

Nothing of the first was run on a GPU: a step takes what `benchmarks/layouts.py` says that it takes
at least. Arrivals have the statistics of a public trace (`benchmarks/arrivals.py`), at a rate that
is a share of what the replicas can serve. The second command times the steps of the tiny model with
1 to 16 requests, simulates one replica with these times, and compares the simulation with a run of
the real engine that gets the same requests at the same moments (`benchmarks/engine_check.py`).
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import quiet_engines, write  # noqa: E402

quiet_engines()  # before torch is imported: more threads wait for each other on a busy machine

from benchmarks.arrivals import TRACES, Prefixes, Trace, Workload  # noqa: E402
from benchmarks.layouts import (  # noqa: E402
    FLASH,
    GEMMA,
    MEMORY,
    Layout,
    Model,
    held,
    step,
)
from benchmarks.memory import token_bytes  # noqa: E402
from benchmarks.model_memory import SHARE  # noqa: E402
from benchmarks.replicas import POLICIES, Engine, simulate  # noqa: E402
from benchmarks.router_tables import router  # noqa: E402
from benchmarks.tables import markdown  # noqa: E402


@dataclass(frozen=True)
class Served:
    """A model on the devices of a replica.

    Attributes:
        model: with the tokens of a pass.
        layout: of one replica.
        seats: requests at a time.
    """

    model: Model
    layout: Layout
    seats: int

    def engine(self, context: int) -> Engine:
        """The replica, with requests behind `context` tokens on average.

        The prefix cache has the memory that weights and full seats leave.
        """
        tokens = context + self.model.geometry.canvas
        left = SHARE * MEMORY - held(self.model, self.layout, self.seats, tokens)
        each = token_bytes(self.model.geometry, self.layout.tensor)
        seconds = floor_seconds(self.model, self.layout, context)
        page = self.model.geometry.canvas if self.model is FLASH else 16
        return Engine(seconds, self.seats, cache_tokens=int(left / each), page=page)


SERVED = {
    FLASH.name: Served(FLASH, Layout(4), seats=64),
    GEMMA.name: Served(GEMMA, Layout(1), seats=16),
}


def floor_seconds(model: Model, layout: Layout, context: int) -> Callable[[int, int, int], float]:
    """The least time of a step, from requests that denoise and prompt tokens, in seconds.

    Prompt tokens are counted as so many more canvases, in units of 32 tokens to save work.
    """
    known: dict[tuple[int, int], float] = {}

    def seconds(requests: int, prompt: int, begun: int) -> float:
        del begun  # costs nothing but its prompt
        key = requests, math.ceil(prompt / 32)
        if key not in known:
            canvases = requests + 32 * key[1] / model.geometry.canvas
            known[key] = step(model, layout, canvases, context).seconds
        return known[key]

    return seconds


def capacity(engine: Engine, trace: Trace, per_pass: float) -> float:
    """Requests a second of one replica whose seats are full and whose cache is empty.

    In each step so many requests begin as end, and their prompts are computed.
    """
    passes = max(1.0, trace.output.mean / per_pass)
    begin = engine.seats / passes
    return begin / engine.step_seconds(engine.seats, round(begin * trace.prompt.mean), 0)


def simulated(args: argparse.Namespace) -> dict[str, Any]:
    """Figures by model, trace, number of replicas and policy: medians over the seeds."""
    results: dict[str, Any] = {}
    for name, served in SERVED.items():
        for title, trace in TRACES.items():
            context = round(trace.prompt.mean + trace.output.mean / 2)
            engine = served.engine(context)
            most = capacity(engine, trace, served.model.tokens)
            rows: dict[str, Any] = {}
            for replicas in args.replicas:
                rate = args.load * most * replicas
                workload = Workload(trace, Prefixes(), rate, served.model.tokens)
                loads = [workload.draw(args.requests * replicas, seed) for seed in args.seeds]
                rows[str(replicas)] = {
                    policy: medians(
                        [simulate(load, engine, replicas, choose).figures() for load in loads]
                    )
                    for policy, choose in POLICIES.items()
                }
            results.setdefault(name, {})[title] = {
                "layout": str(served.layout),
                "seats": served.seats,
                "cache_tokens": engine.cache_tokens,
                "capacity_requests_per_s": most,
                "replicas": rows,
            }
    return results


def medians(figures: list[dict[str, float]]) -> dict[str, float]:
    """The median of each figure."""
    return {key: median(one[key] for one in figures) for key in figures[0]}


def show(results: Mapping[str, Any]) -> None:
    print(*markdown(router(results)), sep="\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--requests", type=int, default=500, help="for each replica")
    parser.add_argument("--load", type=float, default=0.7, help="share of what can be served")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of arrivals")
    parser.add_argument("--check", action="store_true", help="against the real engine, on a CPU")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="of the check")
    parser.add_argument("--rounds", type=int, default=3, help="of the check")
    parser.add_argument("--limit", type=float, default=15, help="deviation that passes, percent")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    if args.check:
        from benchmarks.engine_check import check

        return check(args)
    results = {"load": args.load, "seeds": args.seeds, "models": simulated(args)}
    show(results)
    write(args.json, "router", results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
