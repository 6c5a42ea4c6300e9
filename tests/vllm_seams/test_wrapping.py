"""The helper that wraps vLLM's functions keeps them what they are, and wraps them once."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from vllm_dllm.vllm_seams.wrapping import wrap


class Wrapped:
    """As a class of vLLM; each test gets a copy."""

    def method(self, number: int, *, more: int = 0) -> tuple[Any, ...]:
        """Says what a method was called with."""
        return type(self).__name__, number, more

    @classmethod
    def of_class(cls, number: int) -> tuple[Any, ...]:
        return cls.__name__, number

    @staticmethod
    def static(number: int) -> tuple[Any, ...]:
        return "static", number

    @property
    def size(self) -> tuple[Any, ...]:
        """Its size."""
        return type(self).__name__, "size"

    async def later(self, number: int) -> tuple[Any, ...]:
        return type(self).__name__, number

    constant = 3


@pytest.fixture
def owner() -> Any:
    return type("Owner", (), dict(vars(Wrapped)))


def noting(calls: list[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator; `calls` gets the positional arguments of each call."""

    def decorator(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            calls.append(args)
            return original(*args, **kwargs)

        return wrapper

    return decorator


def test_a_method_stays_a_method(owner: Any) -> None:
    calls: list[Any] = []
    stock = owner.method
    wrap(owner, "method", noting(calls))
    one = owner()
    assert one.method(4, more=2) == ("Owner", 4, 2)
    assert calls == [(one, 4)]
    assert owner.method.__wrapped__ is stock
    assert owner.method.__name__ == "method"
    assert owner.method.__doc__ == "Says what a method was called with."
    assert inspect.signature(owner.method) == inspect.signature(stock)


def test_a_class_method_stays_a_class_method(owner: Any) -> None:
    calls: list[Any] = []
    wrap(owner, "of_class", noting(calls))
    wrap(owner, "of_class", noting(calls))
    assert owner.of_class(4) == owner().of_class(4) == ("Owner", 4)
    assert calls == [(owner, 4)] * 2
    assert owner.of_class.__name__ == "of_class"


def test_an_inherited_method_is_wrapped_for_one_class(owner: Any) -> None:
    calls: list[Any] = []
    below, beside = type("Below", (owner,), {}), type("Beside", (owner,), {})
    wrap(below, "method", noting(calls))
    one = below()
    assert (one.method(1), beside().method(2)) == (("Below", 1, 0), ("Beside", 2, 0))
    assert calls == [(one, 1)]


def test_a_coroutine_function_can_be_awaited(owner: Any) -> None:
    def decorator(original: Callable[..., Any]) -> Callable[..., Any]:
        async def wrapper(self: Any, number: int) -> Any:
            return await original(self, number + 1)

        return wrapper

    wrap(owner, "later", decorator)
    assert inspect.iscoroutinefunction(owner.later)
    assert asyncio.run(owner().later(1)) == ("Owner", 2)


def test_a_function_of_a_module() -> None:
    calls: list[Any] = []
    module = ModuleType("module")
    module.double = lambda number: 2 * number  # type: ignore[attr-defined]
    wrap(module, "double", noting(calls))
    assert module.double(4) == 8
    assert calls == [(4,)]


@pytest.mark.parametrize("name", ["method", "later"])
def test_what_is_wrapped_is_wrapped_once(owner: Any, name: str) -> None:
    wrap(owner, name, noting([]))
    first = inspect.getattr_static(owner, name)

    def never(original: Callable[..., Any]) -> Callable[..., Any]:
        raise AssertionError("wrapped twice")

    wrap(owner, name, never)
    assert inspect.getattr_static(owner, name) is first


def test_what_others_have_wrapped_since_is_not_wrapped_again(owner: Any) -> None:
    import functools

    wrap(owner, "method", noting([]))
    ours = owner.method

    @functools.wraps(ours)
    def theirs(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    owner.method = theirs
    wrap(owner, "method", noting([]))
    assert owner.method is theirs


def test_what_is_not_there_is_an_error(owner: Any) -> None:
    with pytest.raises(AttributeError):
        wrap(owner, "missing", noting([]))


@pytest.mark.parametrize("name", ["static", "size", "constant"])
def test_other_kinds_of_attributes_are_an_error(owner: Any, name: str) -> None:
    with pytest.raises(TypeError, match=name):
        wrap(owner, name, noting([]))
