"""Compile on all cores: vLLM binds a worker of its CPU platform to cores of its own.

A start compiles a few dozen functions to C++. Each takes about a second of the C++ compiler, which
inherits the worker's cores, and PyTorch runs as many compilers at a time as a process has cores. On
a machine with two cores vLLM keeps one for the front end, which waits meanwhile.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch._inductor import config

MOST_COMPILERS = 8


@contextmanager
def on_all_cores() -> Iterator[None]:
    """A context in which the C++ compiler may use the engine's cores beside the worker's own."""
    if not multiprocessing.current_process().daemon:
        # PyTorch would start Python processes that compile, which takes longer than it saves.
        yield
        return
    own = os.sched_getaffinity(0)
    cores = own | os.sched_getaffinity(os.getppid())
    os.sched_setaffinity(0, cores)
    try:
        with config.patch(compile_threads=min(len(cores), MOST_COMPILERS)):
            yield
    finally:
        os.sched_setaffinity(0, own)


def compiling_on_all_cores(original: Callable[..., None]) -> Callable[..., None]:
    """A decorator for the runner's method that runs the model for the first time."""

    def warming_up_model(self: Any) -> None:
        with on_all_cores():
            original(self)

    return warming_up_model
