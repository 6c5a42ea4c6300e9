"""Functions of tensors as kernels that PyTorch's compiler writes, one graph for any number of rows.

A step of a small batch is a few hundred operators of a few microseconds each; compiled, it is a
few loops. The compiler may round floating-point numbers otherwise than the operators do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.fx.experimental import _config as symbolic_shapes

Function = TypeVar("Function", bound=Callable[..., Any])

_OPTIONS = {
    # Operators that the compiler writes out anew for each use of their result, before it keeps the
    # result instead. An integer hash uses every number twice, so that its text doubles with each
    # round: with the compiler's own 30 it takes minutes to write a few dozen lines.
    "realize_opcount_threshold": 12,
    # As vLLM's CPU platform has it: the number of threads is looked up when a loop runs.
    "cpp.dynamic_threads": True,
}
# Kinds of arguments for a function: engines of one process share what is compiled, and one more
# than this is an error in the middle of a step.
_KINDS = 64


@functools.cache
def compiled(function: Function) -> Function:
    """`function` compiled, at its first call for each kind of arguments, and never run otherwise.

    Sizes are free, but for 0 and 1. What cannot be compiled is an error.
    """
    return torch.compile(
        function, dynamic=True, fullgraph=True, options=_OPTIONS, recompile_limit=_KINDS
    )


@contextmanager
def compiling_ahead() -> Iterator[None]:
    """Calls made in here are for what is compiled, and their sizes are examples.

    Without gradients, as in the engine. Two sizes that happen to be the same are not taken for one.
    """
    with torch.inference_mode(), symbolic_shapes.patch(use_duck_shape=False):
        yield
