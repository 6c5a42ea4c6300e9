"""A worker that fails at its warm-up; the last rank does, and the others wait for it."""

from __future__ import annotations

import time
from typing import Any

from vllm_cpu_v2.worker import CpuV2Worker

LINGERS_SECONDS = 3


class LingeringError(ArithmeticError):
    """Takes long to be freed: SIGTERM comes meanwhile, whose ``SystemExit`` `__del__` loses."""

    def __del__(self) -> None:
        time.sleep(LINGERS_SECONDS)


class FailingWorker(CpuV2Worker):
    def compile_or_warm_up_model(self) -> Any:
        if self.rank == self.parallel_config.world_size - 1:
            raise LingeringError("planted in the warm-up")
        return super().compile_or_warm_up_model()


class WorkerThatTakesNoRequest(CpuV2Worker):
    """The last rank fails to set up any request; given as ``--worker-cls``."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        if self.rank == self.parallel_config.world_size - 1:
            self.model_runner.model_state._take_up = self.fail

    def fail(self, *_: Any, **__: Any) -> None:
        raise ArithmeticError("planted on one rank")
