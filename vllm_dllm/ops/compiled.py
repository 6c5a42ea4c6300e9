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
from types import CodeType, FunctionType
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch._dynamo.decorators import mark_unbacked
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch.fx.experimental import _config

Function = TypeVar("Function", bound=Callable[..., Any])
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_OPTIONS: dict[str, int | bool] = {
    # The compiler repeats an expression of up to this many operators wherever its result is used.
    # An integer hash uses every number twice, so its code doubles with each round: with the default
    # of 30, a few dozen lines take minutes to compile.
    "realize_opcount_threshold": 12,
    # The last elements of a loop are taken one by one, because masked vectors would double the code
    # to compile. Vectors divide a vocabulary and a block of 32, so that few loops have such a tail.
    "cpp.enable_loop_tail_vec": False,
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
    """Return `function`, compiled as a whole at its first call for each kind of arguments.

    Tensors may have any sizes, but sizes 0 and 1 are compiled separately.
    """
    # PyTorch 2.13 has the limit as an option of `torch.compile`, too; 2.11 has not.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _KINDS)
    made: Any = torch.compile(function, fullgraph=True, **OF_ROWS)
    return made


class CompiledOnce(Generic[Arguments, Result]):
    """A function of a batch, compiled at its first call for batches of any size, even 1.

    Arguments are tensors, and dataclasses, sequences and mappings of tensors. The first dimension
    of all of them is the batch's (but see `any_size`); their other sizes are constants, so that a
    reduction over the positions of a canvas shares a kernel with what surrounds it.

    No guards choose a graph for each call, because checking them takes longer than a step's small
    loops. So later arguments must be as the first ones: the same types and dtypes, the same
    attributes but for tensors, and None where there was None. Sizes and strides of tensors are
    checked.
    """

    def __init__(self, function: Callable[Arguments, Result]) -> None:
        self.function = function
        self._compiled: Callable[Arguments, Result] | None = None

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        """Call the function."""
        if self._compiled is None:
            return self._compile(*args, **kwargs)
        return self._compiled(*args, **kwargs)

    def _compile(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        """Compile the function for these arguments, and call it."""
        # A new dictionary, because `torch.compile` takes the filter out of the one that it gets.
        unguarded = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
        how = {**OF_BATCHES, "options": OF_BATCHES["options"] | unguarded}
        any_size(args, kwargs)
        # PyTorch keeps what it makes with the code. Engines of one process would find each other's
        # graphs there, and take them unchecked, so that each compiles a copy of its own.
        own = with_code(self.function, self.function.__code__.replace())
        result = torch.compile(own, fullgraph=True, **how)(*args, **kwargs)
        # What is left without guards is to call the code that was made, as vLLM does with that of
        # its models (`TorchCompileWithNoGuardsWrapper`).
        (made,) = _debug_get_cache_entry_list(own)
        self._compiled = with_code(own, made.code)
        return result


def with_code(function: Function, code: CodeType) -> Function:
    """Return a copy of a function that runs this code."""
    copy: Any = FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def any_size(*arguments: Any, shape_id: str = "batch") -> None:
    """Let the first dimension of all tensors in these arguments be of any (one) size.

    Those of a dataclass with an attribute `shape_id` have a size of their own.
    """
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            mark_unbacked(argument, 0, hint_override=len(argument), shape_id=shape_id)
        elif is_dataclass(argument):
            own = getattr(argument, "shape_id", shape_id)
            any_size(*(getattr(argument, field.name) for field in fields(argument)), shape_id=own)
        elif isinstance(argument, Mapping):
            any_size(*argument.values(), shape_id=shape_id)
        elif isinstance(argument, Sequence) and not isinstance(argument, str):
            any_size(*argument, shape_id=shape_id)


@contextmanager
def compiling_ahead() -> Iterator[None]:
    """A context for calls whose purpose is to compile functions, with arguments of example sizes.

    Sizes that happen to be equal in an example are compiled as independent sizes.
    """
    symbolic_shapes: Any = _config
    with torch.inference_mode(), symbolic_shapes.patch(use_duck_shape=False):
        yield
