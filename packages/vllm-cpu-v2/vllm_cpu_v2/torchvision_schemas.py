"""Make torchvision importable with a CPU build of torch that its binary library does not fit.

The package index's torchvision is linked against a CUDA build of torch. With a CPU build its
library does not load, so the operators that it would define are missing, and torchvision's Python
code fails when it registers shape functions for two of them. Declaring those two without an
implementation is enough for the import: transforms and image handling do not use them.

transformers imports torchvision when it is imported itself, and vLLM's configuration imports
transformers before any plugin is loaded. `import_hook` calls `declare` early enough. The plugin
also calls it, for installations without the hook.
"""

import contextlib
import importlib.util
import sys
from pathlib import Path

import torch

_SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
# The declaration lives as long as this object.
_library: torch.library.Library | None = None


def missing() -> tuple[str, ...]:
    """Operators that torchvision will ask for and that will not be defined.

    Before torchvision's first import no operator is defined, so its library is loaded here as
    torchvision would load it. Where that works, nothing is missing, and loading the library again
    later does nothing.
    """
    if "torchvision" in sys.modules:
        return ()
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return ()
    if not _undefined():
        return ()
    for path in Path(spec.origin).parent.glob("_C*.*"):
        with contextlib.suppress(OSError, ImportError):
            torch.ops.load_library(str(path))
    return _undefined()


def _undefined() -> tuple[str, ...]:
    """Which of the two operators the dispatcher does not know."""
    return tuple(name for name in _SCHEMAS if not hasattr(torch.ops.torchvision, name))


def declared() -> bool:
    """Whether this process holds our declarations."""
    return _library is not None


def declare() -> bool:
    """Declare the missing operators; returns whether this process has our declarations now."""
    global _library
    names = missing()
    if names and _library is None:
        # This is a fragment, so that a library defining the rest of the namespace may still load.
        _library = torch.library.Library("torchvision", "FRAGMENT")
        for name in names:
            _library.define(_SCHEMAS[name])
    return declared()
