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
        name: name of a function or of a method that takes the instance or the class.
        decorator: called only if the function is not wrapped yet. A method gets the instance or
            the class first.

    Raises:
        AttributeError: the owner has no attribute of this name.
        TypeError: the attribute is not a function, but for example a property or a static method.
    """
    found = inspect.getattr_static(owner, name)
    original = found.__func__ if isinstance(found, classmethod) else found
    if not inspect.isroutine(original) or isinstance(original, staticmethod):
        raise TypeError(f"{name} of {owner!r} is not a function that could be wrapped")
    if not hasattr(original, _WRAPPED):
        wrapper = functools.wraps(original)(decorator(original))
        setattr(wrapper, _WRAPPED, True)
        setattr(owner, name, classmethod(wrapper) if found is not original else wrapper)
