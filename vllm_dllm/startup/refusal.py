"""Make a refused configuration readable in the vLLM traceback that ends a start."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


class RefusedError(RuntimeError):
    """A configuration that cannot be served; the message names the option and the remedy.

    It is not a ``ValueError``, because vLLM's configuration consists of pydantic dataclasses, which
    turn a ``ValueError`` into several lines that quote all of their input.
    """


def refusing_readably(configure: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap `configure` so that it raises `RefusedError` in place of ``ValueError``."""

    def refuse(vllm_config: Any) -> None:
        try:
            configure(vllm_config)
        except ValueError as error:
            raise RefusedError(f"{error}{_named_file(sys.argv)}") from error

    return refuse


def _named_file(arguments: list[str]) -> str:
    """A note that names the file of ``--config``, which may hold the mistake; empty without one."""
    if "--config" not in arguments[1:-1]:
        return ""
    file = arguments[arguments.index("--config") + 1]
    return f" (options were also read from --config {file})"
