"""Prepare a process for vLLM's imports at the moment transformers or torchvision is first imported.

``import vllm`` imports transformers, and transformers imports torchvision, torchaudio and
torchcodec if they are installed, all before any plugin is loaded. A package index may hold these
three only for a CUDA build of torch. With a CPU build

- torchvision's library does not load, so the operators that it would define are missing, and
  torchvision's Python code fails when it registers shape functions for two of them. Declaring those
  two without an implementation is enough: transforms and image handling do not use them;
- the import of torchaudio or torchcodec raises `OSError`, but transformers handles only
  `ImportError`. They are hidden, as no model of this package needs them.

This distribution has a ``.pth`` file that imports this module whenever Python starts. Until
transformers or torchvision is imported, this costs no more than the definition of a class.
"""

import contextlib
import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

_SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
# The declaration lives as long as this `torch.library.Library`. It is None if torchvision fits.
declared: object = None


class PrepareImports(importlib.abc.MetaPathFinder):
    """A finder that finds nothing, but notices what is about to be imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Prepare the process before the finders after this one look for the module."""
        if fullname in ("transformers", "torchvision"):
            # This precedes the imports below, because they look for torchvision themselves.
            sys.meta_path.remove(self)
            _declare_operators()
            _hide_modules()
        return None


def _declare_operators() -> None:
    """Declare the operators that torchvision will ask for and that its library does not define."""
    global declared
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return
    from pathlib import Path

    import torch

    # Before torchvision's first import no operator is defined, so its library is loaded here as
    # torchvision would load it. Loading it again later does nothing.
    for path in Path(spec.origin).parent.glob("_C*.*"):
        with contextlib.suppress(OSError, ImportError):
            torch.ops.load_library(str(path))
    names = [name for name in _SCHEMAS if not hasattr(torch.ops.torchvision, name)]
    if names:
        # This is a fragment, so that a library defining the rest of the namespace may still load.
        declared = library = torch.library.Library("torchvision", "FRAGMENT")
        for name in names:
            library.define(_SCHEMAS[name])


def _hide_modules() -> None:
    """Hide those of torchaudio and torchcodec that are installed and cannot be imported.

    A hidden module looks as if it is not installed: `importlib.util.find_spec` returns None, and an
    import raises `ModuleNotFoundError`.
    """
    for name in ("torchaudio", "torchcodec"):
        if name in sys.modules or importlib.util.find_spec(name) is None:
            continue
        try:
            importlib.import_module(name)
        except (OSError, RuntimeError):
            for loaded in [each for each in sys.modules if each.startswith(f"{name}.")]:
                del sys.modules[loaded]
            sys.modules[name] = None  # type: ignore[assignment]


sys.meta_path.insert(0, PrepareImports())
