"""Why a start failed, as one sentence that a person can read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from vllm_dllm.ranges import shown

# The message of an exception may be pages long; a line of the log should not.
MOST_CHARACTERS = 500


def cause_within(error: BaseException) -> BaseException:
    """The exception that a check raised, without the `ValidationError` that pydantic made of it.

    vLLM's configuration consists of pydantic's dataclasses. These replace a `ValueError` that is
    raised while one is made by a text of several lines, among them the whole input and a URL.

    Returns:
        The same exception if pydantic has not made it of another.
    """
    if isinstance(error, ValidationError):
        for problem in error.errors(include_url=False):
            inner = problem.get("ctx", {}).get("error")
            if isinstance(inner, BaseException):
                return cause_within(inner)
    return error


def readable(error: BaseException) -> str:
    """The reason of a failure in one line, without a stop at its end.

    What only a programmer would understand keeps its exception's name. Pydantic's own complaints
    about a value begin with the name of the option.
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
        # Beside names, the place of a union holds the kinds that were tried.
        name = next((part for part in place if isinstance(part, str)), "")
        message = problem["msg"][:1].lower() + problem["msg"][1:]
        yield f"{name}: {message}, got {shown(problem.get('input'))}"
