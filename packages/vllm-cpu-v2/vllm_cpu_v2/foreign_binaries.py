"""Make torchvision, torchaudio and torchcodec harmless where they were built for another torch.

transformers imports all three when it is imported, if they are installed. A package index may hold
them only for a CUDA build of torch. With a CPU build

- torchvision's library does not load, so the operators that it would define are missing, and
  torchvision's Python code fails when it registers shape functions for two of them. Declaring those
  two without an implementation is enough: transforms and image handling do not use them;
- the import of torchaudio or torchcodec raises `OSError`, but transformers handles only
  `ImportError`. They are hidden, as no model of this package needs them.
"""

import contextlib
import importlib
import importlib.util
import sys
from pathlib import Path

import torch

_SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
# The declaration lives as long as this object. It is None if torchvision fits this torch.
declared: torch.library.Library | None = None


def declare_operators() -> None:
    """Declare the operators that torchvision will ask for and that its library does not define."""
    global declared
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return
    # Before torchvision's first import no operator is defined, so its library is loaded here as
    # torchvision would load it. Loading it again later does nothing.
    for path in Path(spec.origin).parent.glob("_C*.*"):
        with contextlib.suppress(OSError, ImportError):
            torch.ops.load_library(str(path))
    names = [name for name in _SCHEMAS if not hasattr(torch.ops.torchvision, name)]
    if names:
        # This is a fragment, so that a library defining the rest of the namespace may still load.
        declared = torch.library.Library("torchvision", "FRAGMENT")
        for name in names:
            declared.define(_SCHEMAS[name])


def hide_modules() -> None:
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
