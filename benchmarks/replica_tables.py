"""The results of `benchmarks/data_parallel.py` as a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

REPLICAS = ("data_parallel_llada2", "data_parallel_gemma", "data_parallel_sdar")
NAMES = {"llada2": "tiny-llada2", "gemma": "tiny-diffusiongemma", "sdar": "tiny-sdar"}


def data_parallel(*models: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    """By layout and model: answers that are those of one engine, and how many each rank gave."""
    yield ["layout", "model", "answers equal", "of which rank 0, 1, ... gave", "seconds", "alone"]
    for results in models:
        for layout, found in results["layouts"].items():
            yield [
                *(layout, NAMES[results["model"]], f"{found['equal']} of {results['requests']}"),
                ", ".join(str(count) for count in found["served"].values()),
                *(f"{found['seconds']:.0f}", f"{results['alone_seconds']:.0f}"),
            ]
