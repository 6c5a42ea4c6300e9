"""Loops that numba compiles, and rows of tables at raw addresses."""

# numba's decorators have no types.
# mypy: disallow-untyped-decorators=False

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite.binding import ffi
from numba import carray, njit, types
from numba.extending import intrinsic


def _without_special_names(getattribute: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    def found(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattribute(self, name)

    return found


# The library that numba compiles with claims to have any attribute, a `__dict__` among them, which
# is none. vLLM looks through those of all modules when an engine starts on a CPU, and would fail.
_library = type(ffi.lib)
_library.__getattr__ = _without_special_names(_library.__getattr__)


def compiled(function: Callable[..., Any]) -> Any:
    """Compile a function when it is first called, and keep the result on disk."""
    try:
        return njit(cache=True)(function)
    except RuntimeError:  # there is no folder that numba may write to
        return njit(function)


@intrinsic
def _pointer(_context: Any, address: Any) -> Any:
    """A pointer to int32 numbers at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.int32)(address), generate


@compiled
def table_row(address: int, stride: int, row: int) -> np.ndarray:
    """A row of the int32 table ``[rows, stride]`` at an address."""
    return carray(_pointer(address), (row + 1, stride))[row]
