"""Start the processes of an engine from one that has imported vLLM already.

On the CPU vLLM starts the engine and then its worker as fresh interpreters. Each imports vLLM,
which takes five seconds, and the worker begins only after the engine. Python's fork server imports
once and then forks a process for each request.

A fork server cannot give its children a library that was loaded with other settings. OpenMP reads
its settings when it is loaded, so the server starts in the environment of the worker, and only an
engine with one worker is started this way. The engine itself gets back the environment and the
cores that a fresh interpreter would have had.

vLLM chooses how its processes are started in `get_mp_context`, which knows "spawn" and "fork" only.
It is replaced in the front end's launcher, by `platform`, and in a forked engine's executor.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess, SpawnContext, SpawnProcess
from typing import TYPE_CHECKING, Any

from vllm.config import CompilationMode
from vllm.utils import ompmultiprocessing

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# The server imports these modules before it starts its first child.
PRELOADED = "vllm_cpu_v2.imported_before_forking"

# Python has no public way to release a fork server, and its type stubs lack the server's fields.
_server: Any = forkserver._forkserver  # type: ignore[attr-defined]


class ForkedProcess(ForkServerProcess):
    """A child of the fork server, with the environment that its caller has at the start."""

    def start(self) -> None:
        """Start it, with the environment and the cores that this process has now."""
        self._environment = dict(os.environ)
        self._cores = os.sched_getaffinity(0)
        super().start()

    def run(self) -> None:
        """Take over the environment and, except in the worker, the cores; then run the target."""
        if _openmp(self._environment) != _openmp(os.environ):
            # Not the worker, to whose cores OpenMP has bound the server.
            os.sched_setaffinity(0, self._cores)
        os.environ.clear()
        os.environ.update(self._environment)
        # A child knows where its server listens, but would start another one anyway.
        _server.ensure_running = _it_runs
        super().run()


class ForkedEngine(ForkedProcess):
    """An engine that starts with its fork server, and that starts its worker from it as well."""

    def start(self) -> None:
        """Start the server and have it fork the engine; the server ends after its last child."""
        vllm_config = self._kwargs["vllm_config"]  # type: ignore[attr-defined]
        if vllm_config.compilation_config.mode != CompilationMode.NONE:
            from vllm_cpu_v2.compilation import prepare_compiler_elsewhere

            # On the very first start a core is idle while the server imports vLLM.
            prepare_compiler_elsewhere()
        with _running(_environment_of_worker(vllm_config)):
            super().start()

    def run(self) -> None:
        """Make the executor start the worker from the server."""
        from vllm.v1.executor import multiproc_executor

        multiproc_executor.get_mp_context = _WorkerContext
        super().run()


class EngineContext(SpawnContext):
    """Starts an engine from a fork server if it can, and any other process afresh."""

    @staticmethod
    def Process(*args: Any, **kwargs: Any) -> Any:  # type: ignore[override]  # noqa: N802
        """See `SpawnContext`."""
        vllm_config = kwargs.get("kwargs", {}).get("vllm_config")
        forked = vllm_config is not None and can_be_forked(vllm_config)
        return (ForkedEngine if forked else SpawnProcess)(*args, **kwargs)


class _WorkerContext(SpawnContext):
    """Starts a worker from the fork server that started its engine."""

    Process = ForkedProcess  # type: ignore[assignment]


def can_be_forked(vllm_config: VllmConfig) -> bool:
    """Whether the engine has one worker, which vLLM would start as a fresh interpreter.

    A process that has its own fork server, with other settings, starts none for an engine.
    """
    parallel = vllm_config.parallel_config
    return (
        sys.platform == "linux"
        and vllm_config.use_v2_model_runner
        and os.environ.get("VLLM_WORKER_MULTIPROC_METHOD") == "spawn"
        and parallel.distributed_executor_backend == "mp"
        and parallel.local_world_size == 1
        and parallel.data_parallel_size_local == 1
        and not parallel.numa_bind
        and _server._forkserver_address is None
    )


@contextmanager
def _running(environment: Mapping[str, str]) -> Iterator[None]:
    """A fork server that this process forgets afterwards.

    If the process's own code asks for a fork server, it gets another one.

    Args:
        environment: the server's environment; its additions to this process's own are for OpenMP.
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


def _environment_of_worker(vllm_config: VllmConfig) -> dict[str, str]:
    # The engine says the same when it starts the worker.
    ompmultiprocessing.logger.disabled = True
    try:
        manager = ompmultiprocessing.OMPProcessManager(vllm_config)
    finally:
        ompmultiprocessing.logger.disabled = False
    with manager.configure_omp_envs(rank=0, local_rank=0):
        return dict(os.environ)


def _it_runs() -> None:
    """The fork server lives as long as its children, of which this process is one."""


def _openmp(environment: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in environment.items() if k.startswith(("OMP_", "GOMP_", "KMP_"))}
