"""Start the processes of an engine from one that has imported vLLM already.

On the CPU vLLM starts the engine and then its worker as fresh interpreters. Each imports vLLM,
which takes five seconds, the worker only after the engine. Python's fork server does it once: it
imports, and then forks a process for each request.

A fork server cannot give its children a library that was loaded with other settings. OpenMP reads
its own when it is loaded, so the server starts in the environment of the worker, and only an engine
with one worker is started this way. The engine itself gets back the environment and the cores that
a fresh interpreter would have had.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

# Imported by the server before its first child.
PRELOADED = "vllm_dllm.cpu.imported_before_forking"

# Python has no public way to let go of a fork server, and its type stubs know none of its fields.
_server: Any = forkserver._forkserver  # type: ignore[attr-defined]

# Whether this process was forked by a server of ours.
_forked = False


class ForkedProcess(ForkServerProcess):
    """A child of the fork server, with the environment that its caller has when it starts it."""

    def start(self) -> None:
        """Start it, with the environment and the cores that this process has now."""
        self._environment = dict(os.environ)
        self._cores = os.sched_getaffinity(0)
        super().start()

    def run(self) -> None:
        """Take over the environment, and the cores but in the worker; then do what it is for."""
        global _forked
        _forked = True
        if _openmp(self._environment) != _openmp(os.environ):
            # Not the worker, to whose cores OpenMP has bound the server.
            os.sched_setaffinity(0, self._cores)
        os.environ.clear()
        os.environ.update(self._environment)
        # A child knows where its server listens, and would start another one nevertheless.
        _server.ensure_running = _it_runs
        super().run()


class _Context(ForkServerContext):
    Process = ForkedProcess  # type: ignore[assignment]


CONTEXT = _Context()


def forked() -> bool:
    """Whether this process was forked by a server of ours, whose children it can start, too."""
    return _forked


def is_free() -> bool:
    """Whether this process has no fork server of its own, which would have other settings."""
    return _server._forkserver_address is None


@contextlib.contextmanager
def running(environment: Mapping[str, str]) -> Iterator[None]:
    """A fork server, for as long as processes are started from it.

    Behind the block this process forgets the server, so that a fork server which its own code asks
    for is another one. The server ends after its last child.

    Args:
        environment: of the server; what it has beyond this process's own is OpenMP's.
    """
    before = dict(os.environ)
    preloaded = _server._preload_modules
    try:
        os.environ.update(environment)
        _server.set_forkserver_preload([PRELOADED])
        _server.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
        _server._preload_modules = preloaded
    try:
        yield
    finally:
        os.close(_server._forkserver_alive_fd)
        _server._forkserver_alive_fd = None
        _server._forkserver_address = None
        _server._forkserver_pid = None


def _it_runs() -> None:
    """The fork server lives as long as its children, of which this process is one."""


def _openmp(environment: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in environment.items() if k.startswith(("OMP_", "GOMP_", "KMP_"))}
