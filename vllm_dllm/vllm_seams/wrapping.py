"""The only helper that wraps a function of vLLM; it imports neither this package nor vLLM."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

# Set on every wrapper, so that a function is wrapped only once however often `wrap` is called.
_WRAPPED = "_vllm_dllm_patched"


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Make each call of ``owner.name`` a call of ``around(original, ...)``; does so once.

    The wrapper keeps the original's name, docstring and signature, and holds the original as
    ``__wrapped__``.

    Args:
        owner: a module or a class; an inherited method is wrapped for this class alone.
        name: name of a function or of a method that takes the instance or the class.
        around: gets the original and the call's arguments, a method's instance or class first.

    Raises:
        AttributeError: the owner has no attribute of this name.
        TypeError: the attribute is not a function, but for example a property or a static method.
    """
    found = inspect.getattr_static(owner, name)
    original = found.__func__ if isinstance(found, classmethod) else found
    if not inspect.isroutine(original) or isinstance(original, staticmethod):
        raise TypeError(f"{name} of {owner!r} is not a function that could be wrapped")
    if hasattr(original, _WRAPPED):
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    async def call_later(*args: Any, **kwargs: Any) -> Any:
        return await around(original, *args, **kwargs)

    later = inspect.iscoroutinefunction(original)
    wrapper = functools.wraps(original)(call_later if later else call)
    setattr(wrapper, _WRAPPED, True)
    setattr(owner, name, classmethod(wrapper) if found is not original else wrapper)
