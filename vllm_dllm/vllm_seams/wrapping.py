"""The only helper that wraps a function of vLLM.

This module imports neither this package nor vLLM, so that any code that wraps a function of vLLM
can use it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

# Set on every wrapper, so that a function is wrapped only once however often `wrap` is called.
_WRAPPED = "_vllm_dllm_patched"


def wrap(owner: Any, name: str, decorator: Decorator) -> None:
    """Replace ``owner.name`` by ``decorator(original)``, once.

    The wrapper keeps the original's name, docstring and signature, and holds the original as
    ``__wrapped__``.

    Args:
        owner: a module or a class; an inherited method is wrapped for this class alone.
        name: name of a function, or of a method that takes the instance.
        decorator: called only if the function is not wrapped yet.

    Raises:
        AttributeError: the owner has no attribute of this name.
        TypeError: the attribute is not a function, but for example a property or a class method.
    """
    original = inspect.getattr_static(owner, name)
    if not inspect.isroutine(original) or isinstance(original, (classmethod, staticmethod)):
        raise TypeError(f"{name} of {owner!r} is not a function that could be wrapped")
    if not hasattr(original, _WRAPPED):
        wrapper = functools.wraps(original)(decorator(original))
        setattr(wrapper, _WRAPPED, True)
        setattr(owner, name, wrapper)
