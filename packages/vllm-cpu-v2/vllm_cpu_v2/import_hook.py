"""Prepare a process for vLLM's imports at the moment transformers or torchvision is first imported.

``import vllm`` imports transformers, and transformers imports torchvision, torchaudio and
torchcodec, all before any plugin is loaded. A package index may hold these three only for a CUDA
build of torch. This distribution therefore has a ``.pth`` file that imports this module whenever
Python starts. Until transformers or torchvision is imported, this costs no more than a class
definition.
"""

import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class PrepareImports(importlib.abc.MetaPathFinder):
    """A finder that finds nothing, but notices what is about to be imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Prepare the process before the finders after this one look for the module."""
        if fullname in ("transformers", "torchvision"):
            # This precedes the imports below, because they look for torchvision themselves.
            sys.meta_path.remove(self)
            from vllm_cpu_v2 import foreign_binaries

            foreign_binaries.declare_operators()
            foreign_binaries.hide_modules()
        return None


sys.meta_path.insert(0, PrepareImports())
