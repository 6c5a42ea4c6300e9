"""The counters by decoding algorithm in the process that has vLLM's other Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from vllm_dllm.metrics.counts import COUNTERS, Increment, metric_name

LABELS = ["model_name", "engine", "algorithm"]


class AlgorithmCounters:
    """Counters with vLLM's labels and the algorithm's name.

    Every algorithm that requests may choose has its counters from the start, at 0, so that a rate
    misses nothing of the first requests.
    """

    def __init__(
        self, counter_class: type[Any], engines: Mapping[int, list[Any]], algorithms: Iterable[str]
    ) -> None:
        """Register the counters, which vLLM's ``unregister_vllm_metrics`` removes like its own.

        Args:
            counter_class: Prometheus' class of counters, or what a vLLM logger has in its place.
            engines: the values of vLLM's labels, by the index of an engine.
            algorithms: the names of the registered algorithms.

        Raises:
            ValueError: they are registered already.
        """
        self.engines = engines
        self._counters = {
            counter: counter_class(
                name=metric_name(counter), documentation=documentation, labelnames=LABELS
            )
            for counter, documentation in COUNTERS.items()
        }
        for algorithm in algorithms:
            for engine in engines:
                self.add([Increment(algorithm, counter, 0) for counter in COUNTERS], engine)

    def add(self, increments: Iterable[Increment], engine: int) -> None:
        """Count what an engine has sent with one step."""
        for algorithm, counter, amount in increments:
            self._counters[counter].labels(*self.engines[engine], algorithm).inc(amount)
