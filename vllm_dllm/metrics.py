"""Prometheus counters by decoding algorithm; the scheduler counts, see `families.scheduling`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from vllm.v1.metrics.loggers import AggregateStatLoggerBase, PrometheusStatLogger

from vllm_dllm.settings.server import ThresholdUnderLoad
from vllm_dllm.vllm_seams.channels import Counts, take_counts

# Name of a counter -> its description in Prometheus.
COUNTERS: Mapping[str, str] = {
    "denoising_steps": "Number of passes over a request's canvas in which its algorithm ran.",
    "commit_passes": "Number of passes over a request's canvas that only committed it.",
    "waiting_passes": "Number of passes over a request's canvas in which it waited for others.",
    "blocks": "Number of canvases that have left.",
    "committed_tokens": "Number of committed (finalized) tokens.",
    "generation_tokens": "Number of tokens of answers.",
    "finished_requests": "Number of requests that have ended, for whatever reason.",
}
LABELS = ["model_name", "engine", "algorithm"]


def metric_name(counter: str) -> str:
    """The name in Prometheus, whose client adds ``_total``.

    ``vllm bench serve`` adds up all counters with ``num_denoising_steps`` in their names.
    """
    return f"vllm:diffusion_{counter}_by_algorithm"


class AlgorithmCounters(AggregateStatLoggerBase):
    """Counters with vLLM's labels and the algorithm's name.

    They exist from the start, at 0, so that a rate includes the first requests.
    """

    def __init__(
        self,
        vllms: PrometheusStatLogger,
        algorithms: Iterable[str],
        load: ThresholdUnderLoad | None,
    ) -> None:
        """Register the counters with the classes and labels of vLLM's logger (Ray has its own)."""
        self._engines = vllms.per_engine_labelvalues
        self._counters = {
            counter: vllms._counter_cls(
                name=metric_name(counter), documentation=documentation, labelnames=LABELS
            )
            for counter, documentation in COUNTERS.items()
        }
        self._load = load
        if load is not None:
            self._threshold = vllms._gauge_cls(
                name="vllm:diffusion_threshold_under_load",
                documentation="Threshold at the number of running requests.",
                labelnames=LABELS[:2],
                multiprocess_mode="mostrecent",
            )
        nothing = {(algorithm, counter): 0 for algorithm in algorithms for counter in COUNTERS}
        for engine in self._engines:
            self._add(nothing, engine)

    def _add(self, counts: Counts, engine: int) -> None:
        for (algorithm, counter), number in counts.items():
            self._counters[counter].labels(*self._engines[engine], algorithm).inc(number)

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Take the counts out of an engine's statistics, before vLLM's loggers see them."""
        if scheduler_stats is not None:
            self._add(take_counts(scheduler_stats), engine_idx)
            if self._load is not None:
                threshold = self._load.at(scheduler_stats.num_running_reqs)
                self._threshold.labels(*self._engines[engine_idx]).set(threshold)

    def log_engine_initialized(self) -> None:
        """Do nothing: there is nothing to log about the engine."""


def add_counters(
    loggers: list[Any], algorithms: Iterable[str], load: ThresholdUnderLoad | None
) -> None:
    """Put `AlgorithmCounters` in front of vLLM's loggers, one of which is that for Prometheus."""
    *_, vllms = (each for each in loggers if isinstance(each, PrometheusStatLogger))
    loggers.insert(0, AlgorithmCounters(vllms, algorithms, load))
