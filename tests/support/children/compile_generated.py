"""Compile what PyTorch's compiler makes of this package's functions, for a GPU that is not here.

Small models take a step on the CPU, with each function that is compiled replaced: its code for a
GPU is written (`tests.support.generated_kernels`), and each Triton kernel in it is compiled for
compute capability 9.0. Prints a list for each kernel: the function, the kernel, and the error of
Triton's compiler or "".
"""

from __future__ import annotations

import json
import linecache
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.support.children.fake_steps import COMPILING, FakeModel, Launches, smaller
from tests.support.generated_kernels import generated_code
from vllm_dllm.ops.compiled import OF_BATCHES, OF_ROWS, any_size
from vllm_dllm.selftest.steps import MODELS

TARGET = GPUTarget("cuda", 90, 32)
# What PyTorch would tune; a kernel that compiles for one number of elements does for others.
BLOCK = 16
TEMPERATURES = (0.0, 0.7)


def code_of_steps(name: str, on_triton: bool) -> dict[str, str]:
    """The code of each function that steps of a model compile, by the function's name."""
    codes: dict[str, str] = {}

    def written(function: Callable[..., Any], how: Mapping[str, Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            if function.__name__ not in codes:
                if how is OF_BATCHES:
                    any_size(args)
                codes[function.__name__] = generated_code(function, *args, **how)
            return function(*args)

        return run

    with Launches({}), ExitStack() as stack, torch.inference_mode():
        for module in COMPILING:
            for attribute, how in (("compiled", OF_ROWS), ("CompiledOnce", OF_BATCHES)):
                if hasattr(module, attribute):
                    stand_in = partial(written, how=how)
                    stack.enter_context(mock.patch.object(module, attribute, stand_in))
        model = FakeModel(smaller(MODELS[name]), torch.device("cpu"), triton=on_triton)
        model.weight.zero_()
        for temperature in TEMPERATURES:
            for slot in range(2):
                model.admit(slot, temperature=temperature)
            batch = model.batch(2)
            batch.idx_mapping = torch.arange(2)  # which is left empty for a fake step
            model.sampler(torch.zeros(batch.num_draft_tokens, model.hidden).bfloat16(), batch)
    return codes


def kernels_of(code: str) -> Iterator[tuple[str, str]]:
    """The names and sources of the Triton kernels in a file that PyTorch's compiler wrote."""
    yield from re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)'''", code, re.DOTALL)


def error_of(name: str, source: str) -> str:
    """The error with which a kernel does not compile, or ""."""
    found: list[Any] = []

    def template(*_: Any, triton_meta: Mapping[str, Any], **__: Any) -> Callable[[Any], Any]:
        return lambda function: found.append((function, triton_meta["signature"]))

    source = re.sub(r"@triton_heuristics\.\w+", "@template", source)
    source = source.replace("triton_helpers.set_driver_to_cpu()", "")
    # Triton reads the text of a function again.
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), {"template": template, "__name__": name, "__file__": name})
    ((kernel, signature),) = found
    constants = {
        (kernel.arg_names.index(argument),): BLOCK
        for argument, kind in signature.items()
        if kind == "constexpr"
    }
    try:
        triton.compile(ASTSource(kernel, signature, constants), target=TARGET)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    """The arguments are a model of `MODELS`, and whether it has Triton kernels of ours."""
    name, on_triton = map(json.loads, sys.argv[1:])
    found = [
        [function, kernel, error_of(kernel, source)]
        for function, code in code_of_steps(name, on_triton).items()
        for kernel, source in kernels_of(code)
    ]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
