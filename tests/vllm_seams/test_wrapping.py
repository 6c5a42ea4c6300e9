"""The helper that wraps vLLM's functions keeps them what they are, and wraps them once."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest

from vllm_dllm.vllm_seams.wrapping import wrap


class Wrapped:
    """As a class of vLLM; each test gets a copy."""

    def method(self, number: int, *, more: int = 0) -> tuple[Any, ...]:
        """Says what a method was called with."""
        return type(self).__name__, number, more

    @staticmethod
    def static(number: int) -> int:
        return number

    @property
    def size(self) -> int:
        return 3

    async def later(self, number: int) -> tuple[Any, ...]:
        return type(self).__name__, number

    constant = 3


@pytest.fixture
def owner() -> Any:
    return type("Owner", (), dict(vars(Wrapped)))


def more(original: Any, *args: Any, **kwargs: Any) -> Any:
    """What is called in a function's place; the last argument is one more."""
    *first, number = args
    return original(*first, number + 1, **kwargs)


def test_an_inherited_method_is_wrapped_for_one_class(owner: Any) -> None:
    below, beside = type("Below", (owner,), {}), type("Beside", (owner,), {})
    wrap(below, "method", more)
    assert (below().method(1), beside().method(2)) == (("Below", 2, 0), ("Beside", 2, 0))


@pytest.mark.parametrize("name", ["method", "later"])
def test_what_is_wrapped_is_wrapped_once(owner: Any, name: str) -> None:
    """Also where others have wrapped it since."""
    wrap(owner, name, more)
    first = inspect.getattr_static(owner, name)
    wrap(owner, name, more)
    assert inspect.getattr_static(owner, name) is first
    theirs = functools.wraps(first)(lambda *args: first(*args))
    setattr(owner, name, theirs)
    wrap(owner, name, more)
    assert inspect.getattr_static(owner, name) is theirs


@pytest.mark.parametrize("name", ["missing", "static", "size", "constant"])
def test_what_cannot_be_wrapped_is_an_error(owner: Any, name: str) -> None:
    with pytest.raises((AttributeError, TypeError), match=name):
        wrap(owner, name, more)
