"""A worker that fails, and whose error takes long to be freed: SIGTERM comes meanwhile.

So it is with the traceback of a compiler, which thousands of weak references point into.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker


class LingeringError(RuntimeError):
    """The ``SystemExit`` that vLLM's worker raises at SIGTERM is lost in `__del__`."""

    def __del__(self) -> None:
        time.sleep(5)


class LingeringWorker(CPUWorker):
    """Given as ``--worker-cls``."""

    def determine_available_memory(self) -> Any:
        """See `CPUWorker`."""
        raise LingeringError("planted")
