"""A worker that stands for one whose main thread is inside a library when SIGTERM comes."""

from __future__ import annotations

import signal
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker


class DeafWorker(CPUWorker):
    """Given as ``--worker-cls``."""

    def determine_available_memory(self) -> Any:
        """See `CPUWorker`."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        return super().determine_available_memory()
