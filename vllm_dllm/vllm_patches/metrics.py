"""Counters by decoding algorithm beside vLLM's own metrics, see `metrics`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_dllm.vllm_patches.registration import is_ours
from vllm_dllm.vllm_patches.wrapping import wrap


def apply() -> None:
    """Let the loggers of statistics of one of our models have the counters.

    A process that takes requests makes them where its statistics are wanted.
    """
    from vllm.v1.metrics.loggers import StatLoggerManager

    wrap(StatLoggerManager, "__init__", _make_counters)
    wrap(StatLoggerManager, "record", _count)


def _make_counters(original: Callable[..., None]) -> Callable[..., None]:
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    from vllm_dllm.metrics.prometheus import AlgorithmCounters

    def init(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, vllm_config, *args, **kwargs)
        if not is_ours(vllm_config.model_config):
            return
        # vLLM makes one, or takes the one that it is given, such as Ray's.
        *_, logger = (each for each in self.stat_loggers if isinstance(each, PrometheusStatLogger))
        names = vllm_config.model_config.dllm.algorithm_names
        counters = AlgorithmCounters(logger._counter_cls, logger.per_engine_labelvalues, names)
        self.dllm_algorithm_counters = counters

    return init


def _count(original: Callable[..., None]) -> Callable[..., None]:
    from vllm_dllm.metrics.counts import taken_from

    def record(
        self: Any,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int | None = None,
    ) -> None:
        if scheduler_stats is not None and hasattr(self, "dllm_algorithm_counters"):
            increments = taken_from(scheduler_stats.num_kv_fetch_reqs_by_stage)
            self.dllm_algorithm_counters.add(increments, engine_idx or 0)
        original(self, scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)

    return record
