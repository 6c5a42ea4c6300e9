"""A worker that fails at its warm-up; the last rank does, and the others wait for it."""

from __future__ import annotations

import time
from typing import Any

from vllm_cpu_v2.worker import CpuV2Worker

LINGERS_SECONDS = 3


class LingeringError(ArithmeticError):
    """Takes long to be freed, as the traceback of a compiler does.

    SIGTERM comes meanwhile, and the ``SystemExit`` that vLLM's worker raises is lost in `__del__`.
    """

    def __del__(self) -> None:
        time.sleep(LINGERS_SECONDS)


class FailingWorker(CpuV2Worker):
    """Given as ``--worker-cls``."""

    def compile_or_warm_up_model(self) -> Any:
        """See `CpuV2Worker`."""
        if self.rank == self.parallel_config.world_size - 1:
            raise LingeringError("planted in the warm-up")
        return super().compile_or_warm_up_model()
