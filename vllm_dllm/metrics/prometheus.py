"""Keep the counters by decoding algorithm in the process that has vLLM's Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.v1.metrics.loggers import AggregateStatLoggerBase, PrometheusStatLogger

from vllm_dllm.metrics.counts import COUNTERS, Increment, metric_name, taken_from

LABELS = ["model_name", "engine", "algorithm"]


class AlgorithmCounters(AggregateStatLoggerBase):
    """Counters with vLLM's labels and the algorithm's name.

    The counters of every algorithm that requests may choose exist from the start, at 0, so that a
    rate includes the first requests.
    """

    def __init__(self, vllms: PrometheusStatLogger, algorithms: Iterable[str]) -> None:
        """Register the counters, which vLLM's ``unregister_vllm_metrics`` removes like its own.

        Args:
            vllms: vLLM's logger, which has the class of counters (Ray has its own) and the values
                of vLLM's labels by the index of an engine.
            algorithms: the names of the registered algorithms.

        Raises:
            ValueError: the counters are registered already.
        """
        self._engines = vllms.per_engine_labelvalues
        self._counters = {
            counter: vllms._counter_cls(
                name=metric_name(counter), documentation=documentation, labelnames=LABELS
            )
            for counter, documentation in COUNTERS.items()
        }
        for algorithm in algorithms:
            for engine in self._engines:
                self.add([Increment(algorithm, counter, 0) for counter in COUNTERS], engine)

    def add(self, increments: Iterable[Increment], engine: int) -> None:
        """Count what an engine sent with one step."""
        for algorithm, counter, amount in increments:
            self._counters[counter].labels(*self._engines[engine], algorithm).inc(amount)

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Take the increments out of an engine's statistics, before vLLM's loggers see them."""
        if scheduler_stats is not None:
            self.add(taken_from(scheduler_stats.num_kv_fetch_reqs_by_stage), engine_idx)

    def log_engine_initialized(self) -> None:
        """Do nothing: there is nothing to log about the engine."""
