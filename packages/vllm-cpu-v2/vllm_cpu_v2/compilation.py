"""Compile faster on the CPU: use all cores, and start early on what is independent of the model.

vLLM binds a worker of its CPU platform to dedicated cores. A start compiles a few dozen functions
to C++. Each takes about a second of the C++ compiler, which inherits the worker's cores, and
PyTorch runs as many compilers at a time as a process has cores. On a machine with two cores vLLM
keeps one for the front end, which is idle meanwhile.

Before the first function PyTorch finds out which vector instructions the compiler and the processor
support, precompiles its header, and fingerprints itself and Triton. That takes more than 10 seconds
the first time. On the very first start a separate process does this while the engine's processes
import vLLM. A thread of the worker, which waits for that process to finish, does it while the model
is loaded and traced. PyTorch tries all instruction sets of the processor and takes the first that
works; here the rest are not tried.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

from torch._inductor import config
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from torch.compiler import load_compiled_function

MOST_COMPILERS = 8
OBJECTS_BETWEEN_COLLECTIONS = 50_000  # Python's default is 700, or 2,000 from 3.13

# The name is below `vllm`, because that logger has vLLM's handler and level.
logger = logging.getLogger("vllm.cpu_v2")

# The smallest function that is compiled with PyTorch's own header and options.
_SMALLEST = """
#include <torch/csrc/inductor/cpp_prefix.h>
// at::vec::
extern "C" void kernel(const float* source, float* target) { target[0] = source[0]; }
"""


def all_cores() -> set[int]:
    """The worker's cores and those of the engine, which is idle while the worker starts."""
    engine = multiprocessing.parent_process()
    own = os.sched_getaffinity(0)
    return own if engine is None else own | os.sched_getaffinity(engine.pid or 0)


@contextmanager
def compiling_on_all_cores() -> Iterator[None]:
    """A context for the first run of a model, which compiles it.

    In it the C++ compiler may also use the engine's cores. Python looks for reference cycles less
    often: the compiler makes millions of objects, most of which live until it is done.
    """
    cores, threshold = os.sched_getaffinity(0), gc.get_threshold()
    compilers = config.compile_threads
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS, *threshold[1:])
    if multiprocessing.current_process().daemon:
        # Elsewhere PyTorch would start Python processes, which takes longer than it saves.
        os.sched_setaffinity(0, all_cores())
        compilers = min(len(all_cores()), MOST_COMPILERS)
    try:
        with config.patch(compile_threads=compilers):
            yield
    finally:
        os.sched_setaffinity(0, cores)
        gc.set_threshold(*threshold)


def load_what_is_compiled() -> None:
    """Enable vLLM to load a model that an earlier start has compiled.

    vLLM keeps a compiled model in a file. When it loads one, it calls a method that only models
    compiled by its own backend have. On the CPU PyTorch's backend compiles the whole model, so the
    call raises, and every start compiles again.
    """
    from vllm.compilation import decorators

    loads = decorators._try_load_aot_compiled_fn
    # The function sees this name in place of its module's name; everything else sees PyTorch.
    torch = SimpleNamespace(compiler=SimpleNamespace(load_compiled_function=_load_complete))
    scope = {**loads.__globals__, "torch": torch}
    decorators._try_load_aot_compiled_fn = FunctionType(loads.__code__, scope, loads.__name__)


def _load_complete(*args: Any, **kwargs: Any) -> Any:
    loaded: Any = load_compiled_function(*args, **kwargs)
    function = loaded._artifacts.compiled_fn
    if not hasattr(function, "finalize_loading"):
        function.finalize_loading = lambda vllm_config: None  # it is complete as it is
    return loaded


def prepare_compiler_elsewhere() -> subprocess.Popen[bytes] | None:
    """Do the work of `prepare_compiler` in a process that ends by itself, before there is a worker.

    Returns:
        The process; None if an earlier start has compiled, or if there is no core for it.
    """
    headers = Path(default_cache_dir()) / "precompiled_headers"
    if headers.is_dir() or len(os.sched_getaffinity(0)) < 2:
        return None
    # With -P the process ignores modules in the current folder.
    return subprocess.Popen(
        [sys.executable, "-P", "-m", __name__],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def prepare_compiler() -> threading.Thread:
    """Start on what every compilation needs first; the thread ends when that is done.

    Meanwhile any other query for the vector instructions waits for it. PyTorch's check of one of
    them changes the compiler's options for a moment, so two simultaneous checks may leave an option
    set. The next start would then not find what this one has compiled.
    """
    from torch._inductor import cpu_vec_isa

    candidates = x86_candidates()
    thread = threading.Thread(
        target=_prepare, args=(all_cores(), candidates), name="compiler", daemon=True
    )
    listed = cpu_vec_isa.valid_vec_isa_list

    def once_prepared() -> list[cpu_vec_isa.VecISA]:
        if threading.current_thread() is not thread:
            thread.join()
        # With either of these PyTorch chooses from the list; otherwise it takes the first.
        if config.cpp.simdlen is not None or os.getenv("ATEN_CPU_CAPABILITY"):
            return listed()
        first = first_working(candidates)
        return listed() if first is None else [first]

    cpu_vec_isa.valid_vec_isa_list = once_prepared  # type: ignore[assignment]
    thread.start()
    return thread


def x86_candidates() -> list[Any]:
    """What PyTorch would try on this processor, best first; empty if it is not an x86 processor."""
    from torch._inductor import cpu_vec_isa

    if platform.machine() not in ("x86_64", "AMD64"):
        return []
    present = set(cpu_vec_isa.x86_isa_checker())
    return [isa for isa in cpu_vec_isa.supported_vec_isa_list if set(str(isa).split()) <= present]


def first_working(candidates: Iterable[Any]) -> Any | None:
    """The first for which the compiler makes code that loads; PyTorch remembers each answer."""
    return next((isa for isa in candidates if isa), None)


def _prepare(cores: set[int], candidates: Iterable[Any]) -> None:
    os.sched_setaffinity(0, cores)  # for this thread and the compilers that it starts
    try:
        from torch._inductor import codecache

        with ThreadPoolExecutor(1) as pool:
            pool.submit(codecache.torch_key)
            first_working(candidates)
        codecache.triton_key()
        codecache.CppPythonBindingsCodeCache.load_pybinding(
            ["const float*", "float*"], _SMALLEST, device_type="cpu"
        )
    except Exception:
        # If anything is wrong, the compilation itself will report it.
        logger.debug("dllm: the compiler could not be prepared", exc_info=True)


if __name__ == "__main__":
    prepare_compiler().join()
