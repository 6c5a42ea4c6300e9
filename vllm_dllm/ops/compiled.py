"""Functions compiled by PyTorch's compiler, with one graph for any number of rows or canvases.

A step of a small batch consists of a few hundred operators of a few microseconds each; compiled, it
becomes a few loops. Compiled functions may round floating-point numbers differently from the
operators.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import torch
from torch._dynamo.decorators import mark_unbacked
from torch.fx.experimental import _config as symbolic_shapes

Function = TypeVar("Function", bound=Callable[..., Any])

_OPTIONS: dict[str, int | bool] = {
    # The compiler repeats an expression of up to this many operators wherever its result is used;
    # it stores the result of a larger one. An integer hash uses every number twice, so its code
    # doubles with each round: with the default of 30, a few dozen lines take minutes to compile.
    "realize_opcount_threshold": 12,
    # As on vLLM's CPU platform, the number of threads is looked up when a loop runs.
    "cpp.dynamic_threads": True,
}
# How functions of rows are compiled, and functions of whole batches. The cost of the latter is the
# number of their kernels: a reduction over few positions shares a kernel with what surrounds it.
OF_ROWS: Mapping[str, Any] = {"dynamic": True, "options": _OPTIONS}
OF_BATCHES: Mapping[str, Any] = {
    "dynamic": None,
    "options": _OPTIONS | {"unroll_reductions_threshold": 1},
}
# How many kinds of arguments one function may be compiled for. All engines of a process share the
# compiled functions, and exceeding this limit would be an error in the middle of a step.
_KINDS = 64


@functools.cache
def compiled(function: Function) -> Function:
    """Return `function`, compiled at its first call for each kind of arguments.

    Tensors may have any sizes, but sizes 0 and 1 are compiled separately. A function that cannot be
    compiled as a whole raises an error rather than run without compilation.
    """
    return _compile(function, OF_ROWS)


@functools.cache
def compiled_for_batches(function: Function) -> Function:
    """Return `function`, compiled at its first call for each kind of arguments.

    Sizes of tensors are constants, so that a reduction over the positions of a canvas shares a
    kernel with what surrounds it; but see `any_batch`. Otherwise this is as `compiled`.
    """
    return _compile(function, OF_BATCHES)


def _compile(function: Function, how: Mapping[str, Any]) -> Function:
    return torch.compile(function, fullgraph=True, recompile_limit=_KINDS, **how)


def any_batch(*arguments: Any) -> None:
    """Let the first dimension of all tensors in these arguments be of any size, even 1.

    The next call of a function from `compiled_for_batches` with these arguments compiles one graph
    for all sizes. Tensors are found in dataclasses, sequences and mappings.
    """
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            mark_unbacked(argument, 0, hint_override=len(argument))
        elif is_dataclass(argument):
            any_batch(*(getattr(argument, field.name) for field in fields(argument)))
        elif isinstance(argument, Mapping):
            any_batch(*argument.values())
        elif isinstance(argument, Sequence) and not isinstance(argument, str):
            any_batch(*argument)


@contextmanager
def compiling_ahead() -> Iterator[None]:
    """A context for calls whose purpose is to compile functions, with arguments of example sizes.

    Gradients are off, as in the engine. Sizes that happen to be equal in an example are compiled as
    independent sizes.
    """
    with torch.inference_mode(), symbolic_shapes.patch(use_duck_shape=False):
        yield
