"""How serving grows from 1 to 64 H200s, on paper: layouts, bytes on the wires, memory, speeds.

    .venv/bin/python benchmarks/scaling.py --json benchmarks/results/scaling.json

Nothing of this was run on a GPU. `benchmarks/layouts.py` has the model of a step and every
assumption with its source. A layout is written as "tensor 2, expert 8, 4 x": attention over two
devices, experts over eight, and four such groups that are independent of each other. Speeds are
upper bounds: they follow from the least time that a step can take.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import layouts as paper  # noqa: E402
from benchmarks.common import write  # noqa: E402
from benchmarks.layouts import MODELS, Layout, Model  # noqa: E402
from benchmarks.memory import UnevenError  # noqa: E402
from benchmarks.scaling_tables import TABLES  # noqa: E402
from benchmarks.tables import markdown  # noqa: E402

DEVICES = (1, 2, 4, 8, 16, 32, 64)
# Requests of a rank that are tried; 256 is the most that this package takes by default.
REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# Tokens a second: of one user, and of one GPU. The lowest targets ask for nothing.
PER_USER = {"LLaDA2.0-flash": (0, 250, 500), "DiffusionGemma-26B-A4B": (0, 500, 1000)}
PER_GPU = {"LLaDA2.0-flash": (0, 1000, 4000), "DiffusionGemma-26B-A4B": (0, 1000, 2000)}


@dataclass(frozen=True)
class Point:
    """A layout at work.

    Attributes:
        layout: of all devices.
        requests: of each rank.
        user, gpu: tokens a second of one request, and of one device.
        milliseconds: of a step.
        communicating: the share of the step that is communication.
    """

    layout: Layout
    requests: int
    user: float
    gpu: float
    milliseconds: float
    communicating: float

    def figures(self) -> dict[str, Any]:
        """As it is written."""
        return {
            "layout": str(self.layout),
            "requests_per_rank": self.requests,
            "tokens_per_s_user": self.user,
            "tokens_per_s_gpu": self.gpu,
            "tokens_per_s": self.gpu * self.layout.devices,
            "step_ms": self.milliseconds,
            "communication": self.communicating,
        }


def points(model: Model, devices: int, context: int) -> Iterator[Point]:
    """Every layout of so many devices with every number of requests that fits."""
    for layout in paper.layouts(devices):
        for requests in REQUESTS:
            if not paper.fits(model, layout, requests, context + model.geometry.canvas):
                break
            try:
                found = paper.step(model, layout, requests, context)
            except UnevenError:
                break
            user = model.tokens / found.seconds
            yield Point(
                layout,
                requests,
                user,
                gpu=user * requests / layout.tensor,
                milliseconds=1e3 * found.seconds,
                communicating=found.communicating / found.seconds,
            )


def best_per_gpu(found: Iterable[Point], user: float) -> Point | None:
    """The most tokens a second of each GPU, where each user has at least so many."""
    return max((p for p in found if p.user >= user), key=lambda p: p.gpu, default=None)


def best_per_user(found: Iterable[Point], gpu: float) -> Point | None:
    """The most tokens a second of each user, where each GPU gives at least so many."""
    return max((p for p in found if p.gpu >= gpu), key=lambda p: p.user, default=None)


def compared(model: Model) -> list[Layout]:
    """Layouts whose bytes are shown: each way alone on a node, and across nodes."""
    candidates = [Layout(n) for n in (1, 2, 4, 8)]
    candidates += [Layout(1, 8), Layout(2, 4), Layout(1, 16), Layout(1, 64), Layout(8, 8)]
    return [layout for layout in candidates if _divides(model, layout)]


def _divides(model: Model, layout: Layout) -> bool:
    try:
        paper.step(model, layout, 1, 0)
    except UnevenError:
        return False
    return True


def wires(model: Model, layout: Layout, requests: int, context: int) -> dict[str, float]:
    """The bytes of a step on each device, and how long it takes at least."""
    found = paper.step(model, layout, requests, context)
    tokens = requests * model.geometry.canvas
    return {
        "read_gb": found.read / 1e9,
        "nvlink_mb": found.nvlink / 1e6,
        "network_mb": found.network / 1e6,
        "to_all_mb": paper.exchange_with_all(model, layout, tokens) / 1e6,
        "computing_ms": 1e3 * found.computing,
        "communicating_ms": 1e3 * found.communicating,
    }


def memory(model: Model, layout: Layout, context: int) -> dict[str, Any]:
    """Bytes of a device without requests and for each one, and how many fit."""
    tokens = context + model.geometry.canvas
    most = max((n for n in REQUESTS if paper.fits(model, layout, n, tokens)), default=0)
    return {
        "weights_gb": paper.weight_bytes(model, layout) / 1e9,
        "held_gb": {str(n): paper.held(model, layout, n, tokens) / 1e9 for n in (1, most) if n},
        "most_requests": most,
    }


def of_model(model: Model, args: argparse.Namespace) -> dict[str, Any]:
    """All figures of a model."""
    result: dict[str, Any] = {"bytes": {}, "memory": {}, "per_user": {}, "per_gpu": {}}
    for layout in compared(model):
        result["bytes"][str(layout)] = wires(model, layout, args.requests, args.context)
        result["memory"][str(layout)] = memory(model, layout, args.context)
    for devices in args.devices:
        found = list(points(model, devices, args.context))
        ways = (
            ("per_user", PER_USER, best_per_gpu),
            ("per_gpu", PER_GPU, best_per_user),
        )
        for name, targets, choose in ways:
            chosen = {str(target): choose(found, target) for target in targets[model.name]}
            result[name][str(devices)] = {
                target: point.figures() if point else None for target, point in chosen.items()
            }
    return result


def assumptions() -> dict[str, float]:
    """The constants, whose sources `benchmarks/layouts.py` names."""
    names = ("BANDWIDTH", "RATE", "MEMORY", "SHARE", "NODE", "NVLINK", "NETWORK")
    constants = {name.lower(): getattr(paper, name) for name in names}
    constants |= {"nvlink_wait": paper.NVLINK_WAIT, "network_wait": paper.NETWORK_WAIT}
    return constants | {f"tokens_per_pass {m.name}": m.tokens for m in MODELS.values()}


def show(results: Mapping[str, Any]) -> None:
    """Print the tables of docs/scaling.md."""
    for title, rows in TABLES.items():
        print(f"{title}\n", *markdown(rows(results)), "", sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--devices", type=int, nargs="+", default=list(DEVICES))
    parser.add_argument("--requests", type=int, default=16, help="of a rank, in the table of bytes")
    parser.add_argument("--context", type=int, default=1024, help="tokens before each canvas")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    results: dict[str, Any] = {
        "context": args.context,
        "requests": args.requests,
        "assumptions": assumptions(),
        "models": {name: of_model(model, args) for name, model in MODELS.items()},
    }
    show(results)
    write(args.json, "scaling", results)


if __name__ == "__main__":
    main()
