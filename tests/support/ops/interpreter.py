"""Interpreting Triton kernels on the CPU, in a process in which kernels are native otherwise.

Triton decides when a function is decorated whether it will be interpreted, by the environment
variable TRITON_INTERPRET. Some things then go wrong in a process that has imported
`triton.language` before: library functions such as `tl.max` are native and refuse to be called, the
interpreter does not undo its patches of `triton.language.core`, and it keeps bfloat16 numbers as
integers, multiplies those in `tl.dot`, and cuts float32 numbers off where a GPU rounds them to
bfloat16. This module mends all of that for as long as a kernel runs.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton.language as tl

# The interpreter's grid position and its patches are global: one kernel runs at a time.
_LOCK = threading.RLock()
_COPIES: dict[str, ModuleType] = {}


def interpreted(name: str) -> ModuleType:
    """The module of that name with its kernels interpreted; the native one where CUDA is available.

    The result is a copy: the module that others import and `sys.modules` stay as they are. Modules
    of kernels (their names end in ``_triton``) that it imports are copied, too. There is one copy
    of each, however often it is asked for.
    """
    native = importlib.import_module(name)
    if torch.cuda.is_available():
        return native
    if name not in _COPIES:
        originals = {key: sys.modules.pop(key) for key in list(sys.modules) if _holds_kernels(key)}
        sys.modules.update(_COPIES)
        try:
            with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):
                importlib.import_module(name)
        finally:
            copies = {key: sys.modules.pop(key) for key in list(sys.modules) if _holds_kernels(key)}
            for key, original in originals.items():
                sys.modules[key] = original
                setattr(sys.modules[key.rpartition(".")[0]], key.rpartition(".")[2], original)
        for key, copy in copies.items():
            _COPIES[key] = copy
            _prepare(copy)
    return _COPIES[name]


def _holds_kernels(name: str) -> bool:
    ours = name.startswith(("vllm_dllm.", "canvas_grammar.", "tests."))
    return ours and name.endswith("_triton")


def _prepare(module: ModuleType) -> None:
    """Wrap every kernel of the module in `_running`."""
    from triton.runtime.interpreter import InterpretedFunction

    for kernel in vars(module).values():
        if isinstance(kernel, InterpretedFunction) and "run" not in vars(kernel):
            kernel.run = _running(kernel.run)


def _running(run: Any) -> Any:
    def guarded(*args: Any, **kwargs: Any) -> None:
        # A GPU does not complain about infinities either.
        quiet = np.errstate(over="ignore", invalid="ignore", divide="ignore")
        with (
            _LOCK,
            _device_functions(),
            _bfloat16_products(),
            _bfloat16_rounding(),
            _undone(),
            quiet,
        ):
            run(*args, **kwargs)

    return guarded


@contextmanager
def _device_functions() -> Iterator[None]:
    """Let kernels call functions, including those of Triton's library, which are native.

    The interpreter's own call patches the language each time, which takes milliseconds; here it is
    patched once for each run of a kernel.
    """
    from triton.runtime import interpreter
    from triton.runtime.jit import JITFunction

    functions: dict[Any, Any] = {}
    patched: set[int] = set()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = functions.get(self.fn)
        if found is None:
            found = functions[self.fn] = interpreter.InterpretedFunction(self.fn).rewrite()
            if id(self.fn.__globals__) not in patched:
                patched.add(id(self.fn.__globals__))
                interpreter._patch_lang(self.fn)
        return found(*args, **kwargs)

    with (
        mock.patch.object(JITFunction, "__call__", call),
        mock.patch.object(interpreter.InterpretedFunction, "__call__", call),
    ):
        yield


@contextmanager
def _bfloat16_products() -> Iterator[None]:
    """Let `tl.dot` multiply the numbers that bfloat16 bits stand for, and add in float32."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    original = InterpreterBuilder.create_dot

    def decoded(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = handle.data.view(np.uint16).astype(np.uint32) << 16
        return TensorHandle(bits.view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return original(self, decoded(a), decoded(b), *rest)

    with mock.patch.object(InterpreterBuilder, "create_dot", create_dot):
        yield


@contextmanager
def _bfloat16_rounding() -> Iterator[None]:
    """Round float32 numbers to the nearest bfloat16 number, ties to even, as a GPU does."""
    from triton.runtime import interpreter

    original = interpreter._convert_float

    def convert(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) != (tl.float32, tl.bfloat16):
            return original(data, source, target, mode)
        rounded = torch.from_numpy(np.array(data, dtype=np.float32)).bfloat16()
        return rounded.view(torch.int16).numpy().view(np.uint16)

    with mock.patch.object(interpreter, "_convert_float", convert):
        yield


@contextmanager
def _undone() -> Iterator[None]:
    """Undo what a run changes in Triton's language."""
    places = [tl, tl.core, tl.math, tl.tensor, tl.dtype]
    places += [
        getattr(tl.core, name)
        for name in ("tensor_descriptor_base", "condition")
        if hasattr(tl.core, name)
    ]
    before = [dict(vars(place)) for place in places]
    try:
        yield
    finally:
        for place, attributes in zip(places, before, strict=True):
            for name, value in list(vars(place).items()):
                if name not in attributes:
                    delattr(place, name)
                elif attributes[name] is not value:
                    setattr(place, name, attributes[name])
