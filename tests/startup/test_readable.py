"""One line from whatever made a start fail; the exceptions are pydantic's own."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from vllm_dllm.ranges import SettingsError
from vllm_dllm.startup.readable import MOST_CHARACTERS, cause_within, readable


@dataclass
class Inner:
    """As one of vLLM's configurations; its check is a plugin's."""

    number: int = 1

    def __post_init__(self) -> None:
        if self.number < 0:
            raise SettingsError(f"dllm.number must be at least 0, got {self.number}")
        if self.number >= 10:
            raise AssertionError("ten")


@dataclass
class Outer:
    """A configuration that makes another one."""

    choice: int | list[int] = 0
    inner: Any = None

    def __post_init__(self) -> None:
        self.inner = Inner(number=self.inner or 0)


def refused(**values: Any) -> ValidationError:
    with pytest.raises(ValidationError) as caught:
        Outer(**values)
    return caught.value


def test_the_exception_of_a_check() -> None:
    """Wrapped twice, once by each configuration."""
    error = refused(inner=-1)
    assert "https://" in str(error), "else there is nothing to mend"
    assert type(cause_within(error)) is SettingsError
    assert readable(error) == "dllm.number must be at least 0, got -1"


def test_an_assertion_keeps_its_name() -> None:
    assert readable(refused(inner=10)) == "AssertionError: ten"


def test_a_complaint_of_pydantic_s_own() -> None:
    assert readable(refused(inner="x")).startswith("number: input should be a valid integer")
    text = readable(refused(choice="x"))
    assert text.startswith("choice: ") and "got 'x'" in text and "\n" not in text
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(list[int]).validate_python(["a"])
    assert "got 'a'" in readable(caught.value)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("two\n  lines.\n"), "two lines"),
        (RuntimeError("plain"), "plain"),
        (FileNotFoundError(2, "No such file", "x"), "[Errno 2] No such file: 'x'"),
        (KeyError("name"), "KeyError: 'name'"),
        (RuntimeError(), "RuntimeError: "),
    ],
)
def test_other_exceptions(error: Exception, text: str) -> None:
    assert cause_within(error) is error
    assert readable(error) == text


def test_a_text_without_end() -> None:
    assert len(readable(ValueError("x" * 10_000_000))) == MOST_CHARACTERS
