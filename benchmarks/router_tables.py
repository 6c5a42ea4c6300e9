"""The results of `benchmarks/router_simulation.py` as tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def router(results: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    """By model, trace and number of replicas; a column for each policy.

    A cell has the median and the 99th percentile of the latency, tokens a second of all replicas,
    and the share of prompt tokens that a prefix cache held.
    """
    policies = None
    for model, traces in results["models"].items():
        for trace, found in traces.items():
            for replicas, by_policy in found["replicas"].items():
                if policies is None:
                    policies = list(by_policy)
                    yield ["model", "arrivals", "replicas", *policies]
                yield [model, trace, replicas, *(_cell(by_policy[name]) for name in policies)]


def _cell(figures: Mapping[str, float]) -> str:
    median, most = (figures[key] / 1e3 for key in ("p50_ms", "p99_ms"))
    speed, hits = f"{figures['tokens_per_s']:,.0f}", f"{100 * figures['hit_rate']:.0f} %"
    return f"{median:.2f} / {most:.2f} s; {speed}; {hits}"


def router_steps(results: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    """The calibration of the check."""
    yield ["round", *(f"{n} requests" for n in results["rounds"][0]["calibration"]["denoise_ms"])]
    for number, found in enumerate(results["rounds"], 1):
        steps = found["calibration"]["denoise_ms"].values()
        yield [str(number), *(f"{ms:.2f} ms" for ms in steps)]


def router_check(results: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    """Simulated and real figures of the check."""
    names = {
        "p50_ms": "median, ms",
        "p99_ms": "99th percentile, ms",
        "mean_ms": "mean, ms",
        "tokens_per_s": "tokens/s",
        "hit_rate": "prefix cache hits",
    }
    yield ["round", "figure", "simulated", "real engine", "simulated over real"]
    for number, found in enumerate(results["rounds"], 1):
        for key, title in names.items():
            pair = (found["simulated"][key], found["real"][key])
            form = ".3f" if key == "hit_rate" else ",.0f"
            ratio = f"{pair[0] / pair[1]:.3f}" if pair[1] else "-"
            yield [str(number), title, *(format(one, form) for one in pair), ratio]
