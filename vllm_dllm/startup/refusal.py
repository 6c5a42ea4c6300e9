"""How a refused configuration reads in vLLM's traceback, which ends a start."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


class RefusedError(RuntimeError):
    """A configuration that cannot be served; the message names the option and the remedy.

    It is not a ``ValueError``: vLLM's configuration consists of pydantic's dataclasses, and these
    turn a ``ValueError`` into several lines that quote all of their input.
    """


def refusing_readably(configure: Callable[[Any], None]) -> Callable[[Any], None]:
    """`configure`, which raises ``ValueError``, such that it raises `RefusedError` instead."""

    def refuse(vllm_config: Any) -> None:
        try:
            configure(vllm_config)
        except ValueError as error:
            raise RefusedError(f"{error}{_named_file(sys.argv)}") from error

    return refuse


def _named_file(arguments: list[str]) -> str:
    """Where else than on the command line the mistake may be: in ``--config FILE``, or nowhere."""
    if "--config" not in arguments[1:-1]:
        return ""
    file = arguments[arguments.index("--config") + 1]
    return f" (options were also read from --config {file})"
