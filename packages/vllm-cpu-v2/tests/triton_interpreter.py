"""Run vLLM's Triton kernels on a CPU in Triton's interpreter: a reference for tests, no more.

vLLM decides at import whether Triton is usable, and on a CPU build that takes a backend called
"cpu" among the `triton.backends` entry points. No wheel ships one, so `interpreter_env` writes
one into a test's temporary directory. It compiles nothing; `TRITON_INTERPRET=1` makes Triton
run kernels as Python before a backend is asked. It must never be installed: on a GPU machine a
second active driver disables Triton.
"""

import os
from pathlib import Path

_COMPILER = """
from triton.backends.compiler import BaseBackend

class Compiler(BaseBackend):
    binary_ext = "none"
    supports_target = staticmethod(lambda target: target.backend == "cpu")
    def _unused(self, *args, **kwargs):
        raise NotImplementedError("this backend exists to be found, not to compile")
    hash = parse_options = add_stages = load_dialects = get_module_map = _unused

Compiler.__abstractmethods__ = frozenset()
"""

_DRIVER = """
import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase as _Base

class Driver(_Base):
    is_active = classmethod(lambda cls: True)
    def map_python_to_cpp_type(self, ty): raise NotImplementedError
    def get_current_target(self): return GPUTarget("cpu", 0, 1)
    def get_active_torch_device(self): return torch.device("cpu")
    def get_benchmarker(self): raise NotImplementedError
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0

Driver.__abstractmethods__ = frozenset()
del _Base
"""


def interpreter_env(directory: Path) -> dict[str, str]:
    """Environment of a process in which vLLM finds Triton and Triton interprets kernels."""
    package = directory / "interpreted_triton"
    info = directory / "interpreted_triton-0.dist-info"
    package.mkdir(parents=True)
    info.mkdir()
    (package / "__init__.py").write_text("")
    (package / "compiler.py").write_text(_COMPILER)
    (package / "driver.py").write_text(_DRIVER)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: interpreted-triton\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[triton.backends]\ncpu = interpreted_triton\n")
    env = child_env(directory)
    env["TRITON_INTERPRET"] = "1"
    return env


def child_env(*paths: Path) -> dict[str, str]:
    """Environment of a test's child process: the package and `paths` importable, one thread."""
    root = Path(__file__).resolve().parents[2]
    env = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "PYTHONPATH")}
    # A runner forced by the caller's shell would change what the bridge has to do.
    env.pop("VLLM_USE_V2_MODEL_RUNNER", None)
    env["PYTHONPATH"] = os.pathsep.join(map(str, (root, *paths)))
    env["OMP_NUM_THREADS"] = "1"
    return env
