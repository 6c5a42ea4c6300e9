"""Declare torchvision's missing schemas at the moment torchvision is first imported.

``import vllm`` imports torchvision before any plugin is loaded. On a CPU installation ``make
setup`` therefore writes a ``.pth`` file that imports this module whenever Python starts. Until
torchvision is imported, this costs no more than a class definition.
"""

import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class DeclareSchemas(importlib.abc.MetaPathFinder):
    """A finder that finds nothing; it notices that torchvision is about to be imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Declare the schemas before the finders after this one look for torchvision."""
        if fullname == "torchvision":
            # Before `declare` is called, because it looks torchvision up itself.
            sys.meta_path.remove(self)
            from vllm_dllm.cpu import torchvision_schemas

            torchvision_schemas.declare()
        return None


sys.meta_path.insert(0, DeclareSchemas())
