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

    A static method, a class method and a property each stay what they are. The decorator is given
    the plain function: that of a class method takes the class as its first argument, and that of
    a property is its getter. The wrapper keeps the original's name, docstring and signature, and
    holds the original as ``__wrapped__``.

    Args:
        owner: a module or a class; an inherited method is wrapped for this class alone.
        name: name of the function.
        decorator: called only if the function is not wrapped yet.

    Raises:
        AttributeError: the owner has no attribute of this name.
        TypeError: the attribute is neither callable nor a property with a getter.
    """
    attribute = inspect.getattr_static(owner, name)
    original = _function_in(attribute)
    if not callable(original):
        raise TypeError(f"{name} of {owner!r} is not a function that could be wrapped")
    if hasattr(original, _WRAPPED):
        return
    wrapper = functools.wraps(original)(decorator(original))
    setattr(wrapper, _WRAPPED, True)
    setattr(owner, name, _of_the_same_kind(attribute, wrapper))


def is_wrapped(owner: Any, name: str) -> bool:
    """Whether `wrap` has replaced ``owner.name`` in this process."""
    return hasattr(_function_in(inspect.getattr_static(owner, name)), _WRAPPED)


def _function_in(attribute: Any) -> Any:
    """The plain function in an attribute of a class or a module."""
    if isinstance(attribute, property):
        return attribute.fget
    if isinstance(attribute, (staticmethod, classmethod)):
        return attribute.__func__
    return attribute


def _of_the_same_kind(attribute: Any, wrapper: Callable[..., Any]) -> Any:
    """An attribute that makes a class or a module use `wrapper` as it used `attribute`."""
    if isinstance(attribute, property):
        return property(wrapper, attribute.fset, attribute.fdel, attribute.__doc__)
    if isinstance(attribute, staticmethod):
        return staticmethod(wrapper)
    if isinstance(attribute, classmethod):
        return classmethod(wrapper)
    return wrapper
