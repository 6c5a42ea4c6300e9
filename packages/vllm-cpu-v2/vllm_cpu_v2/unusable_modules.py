"""Hide installed modules whose libraries do not load, so that no code tries to import them.

The CPU build of vLLM requires torchaudio and torchcodec. A package index may hold them only for a
CUDA build of torch. With a CPU build of torch their import then raises `OSError`, but transformers
first checks whether they are installed and handles only `ImportError`. No model of this package
needs them.
"""

import importlib
import importlib.util
import sys

_MODULES = ("torchaudio", "torchcodec")


def hide() -> None:
    """Hide those of the modules that are installed and cannot be imported.

    A hidden module looks as if it is not installed: `importlib.util.find_spec` returns None, and an
    import raises `ModuleNotFoundError`.
    """
    for name in _MODULES:
        if name in sys.modules or importlib.util.find_spec(name) is None:
            continue
        try:
            importlib.import_module(name)
        except (OSError, RuntimeError):
            for loaded in [each for each in sys.modules if each.startswith(f"{name}.")]:
                del sys.modules[loaded]
            sys.modules[name] = None  # type: ignore[assignment]
