"""An engine on the CPU starts sooner: its processes are forked with vLLM imported.

See `vllm_dllm.cpu.fork_server`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm_dllm.cpu import bridge, fork_server
from vllm_dllm.vllm_patches.registration import is_ours
from vllm_dllm.vllm_patches.wrapping import wrap

_EXECUTOR = "vllm.v1.executor.multiproc_executor"
_LAUNCHER = "vllm.v1.engine.utils"

# Whether this process is starting an engine from a fork server.
_launching = False


def apply() -> None:
    """Let the engine, which is in a process forked by the server, start its worker there, too."""
    executor = sys.modules.get(_EXECUTOR)
    if executor is not None and bridge.on_cpu():
        wrap(executor, "get_mp_context", _fork_from_server)


def launched_from_fork_server(original: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator for ``launch_core_engines``, which starts the processes of engines."""

    @contextmanager
    def launch_core_engines(vllm_config: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        with _started_from_server(vllm_config), original(vllm_config, *args, **kwargs) as launch:
            yield launch

    return launch_core_engines


@contextmanager
def _started_from_server(vllm_config: Any) -> Iterator[None]:
    global _launching
    if not _can_be_forked(vllm_config):
        yield
        return
    wrap(sys.modules[_LAUNCHER], "get_mp_context", _fork_from_server)
    _prepare_compiler(vllm_config)
    with fork_server.running(_environment_of_the_worker(vllm_config)):
        _launching = True
        try:
            yield
        finally:
            _launching = False


def _prepare_compiler(vllm_config: Any) -> None:
    """Let the first start of all use a core that waits while the fork server imports vLLM."""
    from vllm.config import CompilationMode

    from vllm_dllm.cpu.compilation import prepare_compiler_elsewhere

    if vllm_config.compilation_config.mode != CompilationMode.NONE:
        prepare_compiler_elsewhere()


def _can_be_forked(vllm_config: Any) -> bool:
    parallel = vllm_config.parallel_config
    return (
        bridge.on_cpu()
        and sys.platform == "linux"
        and is_ours(vllm_config.model_config)
        and os.environ.get("VLLM_WORKER_MULTIPROC_METHOD") == "spawn"
        and parallel.distributed_executor_backend == "mp"
        and parallel.local_world_size == 1
        and parallel.data_parallel_size_local == 1
        and not parallel.numa_bind
        and fork_server.is_free()
    )


def _environment_of_the_worker(vllm_config: Any) -> dict[str, str]:
    from vllm.utils.ompmultiprocessing import OMPProcessManager, logger

    # The engine says the same when it starts the worker.
    logger.addFilter(_nothing)
    try:
        manager = OMPProcessManager(vllm_config)
    finally:
        logger.removeFilter(_nothing)
    with manager.configure_omp_envs(rank=0, local_rank=0):
        return dict(os.environ)


def _nothing(record: logging.LogRecord) -> bool:
    return False


def _fork_from_server(original: Callable[[], Any]) -> Callable[[], Any]:
    def get_mp_context() -> Any:
        if _launching or fork_server.forked():
            return fork_server.CONTEXT
        return original()

    return get_mp_context
