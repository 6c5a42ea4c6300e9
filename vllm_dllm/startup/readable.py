"""Say in one readable sentence why a start failed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from vllm_dllm.ranges import shown

# The message of an exception may be pages long, but a line of the log should not be.
MOST_CHARACTERS = 500


def cause_within(error: BaseException) -> BaseException:
    """The exception that a check raised, without the `ValidationError` that pydantic made from it.

    vLLM's configuration consists of pydantic dataclasses. They replace a `ValueError` that is
    raised during their construction by several lines of text, including the whole input and a URL.

    Returns:
        The same exception if pydantic did not make it from another one.
    """
    if isinstance(error, ValidationError):
        for problem in error.errors(include_url=False):
            inner = problem.get("ctx", {}).get("error")
            if isinstance(inner, BaseException):
                return cause_within(inner)
    return error


def readable(error: BaseException) -> str:
    """The reason for a failure in one line, without a full stop.

    Internal errors keep the exception's class name. Pydantic's own complaints about a value begin
    with the name of the option.
    """
    error = cause_within(error)
    text = " ".join(str(error).split())
    if isinstance(error, ValidationError):
        text = "; ".join(_complaints(error))
    elif not isinstance(error, (ValueError, RuntimeError, OSError)) or not text:
        text = f"{type(error).__name__}: {text}"
    text = text.rstrip(".")
    return text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - 3] + "..."


def _complaints(error: ValidationError) -> Iterator[str]:
    for problem in error.errors(include_url=False, include_context=False):
        place: tuple[Any, ...] = problem["loc"]
        # The location of a union also contains the types that were tried.
        name = next((part for part in place if isinstance(part, str)), "")
        message = problem["msg"][:1].lower() + problem["msg"][1:]
        yield f"{name}: {message}, got {shown(problem.get('input'))}"
