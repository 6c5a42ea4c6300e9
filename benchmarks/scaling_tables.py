"""The results of `benchmarks/scaling.py` as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any


def by_bytes(results: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    """Bytes of a step on one device of each layout."""
    yield [
        *("model", "layout", "read, GB", "sent over NVLink, MB", "sent over the network, MB"),
        *("sent to all ranks, MB", "computing, ms", "communicating, ms"),
    ]
    for name, model in results["models"].items():
        for layout, figures in model["bytes"].items():
            yield [
                *(name, layout, f"{figures['read_gb']:.1f}"),
                *(f"{figures[key]:,.0f}" for key in ("nvlink_mb", "network_mb", "to_all_mb")),
                *(f"{figures[key]:.2f}" for key in ("computing_ms", "communicating_ms")),
            ]


def by_memory(results: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    """What one device of each layout holds."""
    yield ["model", "layout", "weights, GB", "with 1 request, GB", "most requests of a rank"]
    for name, model in results["models"].items():
        for layout, figures in model["memory"].items():
            most = str(figures["most_requests"]) if figures["most_requests"] else "does not fit"
            sizes = (figures["weights_gb"], figures["held_gb"]["1"])
            yield [name, layout, *(f"{size:.1f}" for size in sizes), most]


def best(results: Mapping[str, Any], name: str, way: str) -> Iterable[Sequence[str]]:
    """The best layout of a model for each target; `way` is `per_user` or `per_gpu`.

    A cell has the layout, the requests of a rank, tokens a second for a user and from a GPU.
    """
    goal = {"per_user": "for a user", "per_gpu": "from a GPU"}[way]
    by_devices = results["models"][name][way]
    targets = next(iter(by_devices.values()))
    titles = (f"at least {float(t):,.0f} {goal}" if float(t) else "no target" for t in targets)
    yield ["GPUs", *titles]
    for devices, by_target in by_devices.items():
        yield [devices, *(_cell(point) for point in by_target.values())]


def _cell(point: Mapping[str, Any] | None) -> str:
    if point is None:
        return "none"
    user, gpu = (point[key] for key in ("tokens_per_s_user", "tokens_per_s_gpu"))
    return f"{point['layout']}; {point['requests_per_rank']}; {user:,.0f} / {gpu:,.0f}"


FLASH, GEMMA = "LLaDA2.0-flash", "DiffusionGemma-26B-A4B"
# By the names of their markers in docs/scaling.md.
TABLES: dict[str, Callable[[Mapping[str, Any]], Iterable[Sequence[str]]]] = {
    "scaling_bytes": by_bytes,
    "scaling_memory": by_memory,
    "scaling_user_llada2": lambda results: best(results, FLASH, "per_user"),
    "scaling_user_gemma": lambda results: best(results, GEMMA, "per_user"),
    "scaling_gpu_llada2": lambda results: best(results, FLASH, "per_gpu"),
    "scaling_gpu_gemma": lambda results: best(results, GEMMA, "per_gpu"),
}
