"""The helper that wraps vLLM's functions keeps them what they are, and wraps them once."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from vllm_dllm.vllm_seams.wrapping import is_wrapped, wrap


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


def test_a_class_method_stays_one(owner: Any) -> None:
    """Also for subclasses, which it is given as their class."""
    calls: list[Any] = []
    stock = vars(owner)["of_class"].__func__
    wrap(owner, "of_class", noting(calls))
    below = type("Below", (owner,), {})
    assert owner.of_class(1) == owner().of_class(1) == ("Owner", 1)
    assert below.of_class(2) == ("Below", 2)
    assert calls == [(owner, 1), (owner, 1), (below, 2)]
    assert isinstance(vars(owner)["of_class"], classmethod)
    assert vars(owner)["of_class"].__func__.__wrapped__ is stock


def test_a_static_method_stays_one(owner: Any) -> None:
    calls: list[Any] = []
    stock = owner.static
    wrap(owner, "static", noting(calls))
    assert owner.static(1) == owner().static(1) == ("static", 1)
    assert calls == [(1,), (1,)]
    assert isinstance(vars(owner)["static"], staticmethod)
    assert owner.static.__wrapped__ is stock


def test_a_property_stays_one(owner: Any) -> None:
    calls: list[Any] = []
    stock = owner.size
    wrap(owner, "size", noting(calls))
    one = owner()
    assert one.size == ("Owner", "size")
    assert calls == [(one,)]
    assert isinstance(owner.size, property)
    assert owner.size.__doc__ == "Its size."
    assert owner.size.fget.__wrapped__ is stock.fget
    with pytest.raises(AttributeError):
        one.size = 3


def test_an_inherited_method_is_wrapped_for_one_class(owner: Any) -> None:
    calls: list[Any] = []
    below, beside = type("Below", (owner,), {}), type("Beside", (owner,), {})
    wrap(below, "of_class", noting(calls))
    assert (below.of_class(1), beside.of_class(2)) == (("Below", 1), ("Beside", 2))
    assert calls == [(below, 1)]
    assert is_wrapped(below, "of_class")
    assert not is_wrapped(owner, "of_class") and not is_wrapped(beside, "of_class")


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


@pytest.mark.parametrize("name", ["method", "of_class", "static", "size", "later"])
def test_what_is_wrapped_is_wrapped_once(owner: Any, name: str) -> None:
    assert not is_wrapped(owner, name)
    wrap(owner, name, noting([]))
    first = inspect.getattr_static(owner, name)
    assert is_wrapped(owner, name)

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
    with pytest.raises(TypeError, match="constant"):
        wrap(owner, "constant", noting([]))
