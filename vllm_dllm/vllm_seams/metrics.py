"""Add counters by decoding algorithm to vLLM's own metrics, see `metrics`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_dllm.vllm_seams.registration import is_ours
from vllm_dllm.vllm_seams.wrapping import wrap


def apply() -> None:
    """Add a logger for one of our models wherever statistics are collected.

    vLLM does not make loggers of the entry point ``vllm.stat_logger_plugins`` for ``LLM``, and they
    make every server collect statistics, even with ``--disable-log-stats``.
    """
    from vllm.v1.metrics.loggers import StatLoggerManager

    wrap(StatLoggerManager, "__init__", _add_counters)


def _add_counters(original: Callable[..., None]) -> Callable[..., None]:
    def init(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, vllm_config, *args, **kwargs)
        if not is_ours(vllm_config.model_config):
            return
        from vllm.v1.metrics.loggers import PrometheusStatLogger

        from vllm_dllm.metrics import AlgorithmCounters

        # vLLM makes a logger, or uses one that it is given, such as Ray's.
        *_, vllms = (each for each in self.stat_loggers if isinstance(each, PrometheusStatLogger))
        names = vllm_config.model_config.dllm.algorithm_names
        self.stat_loggers.insert(0, AlgorithmCounters(vllms, names))

    return init
