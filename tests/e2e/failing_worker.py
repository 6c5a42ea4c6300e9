"""A worker that fails at its warm-up; the last rank does, and the others wait for it."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker


class FailingWorker(CPUWorker):
    """Given as ``--worker-cls``."""

    def compile_or_warm_up_model(self) -> Any:
        """See `CPUWorker`."""
        if self.rank == self.parallel_config.world_size - 1:
            raise ArithmeticError("planted in the warm-up")
        return super().compile_or_warm_up_model()
