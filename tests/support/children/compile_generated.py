"""Compile what PyTorch's compiler makes of this package's functions, for a GPU that is not here.

The code comes from steps of small models (`fake_steps`), and each Triton kernel in it is compiled
for compute capability 9.0. Prints a list for each kernel: the function, the kernel, and the error
of Triton's compiler or "".
"""

from __future__ import annotations

import json
import linecache
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.support.children.fake_steps import steps_of_a_small_model

TARGET = GPUTarget("cuda", 90, 32)
# What PyTorch would tune; a kernel that compiles for one number of elements does for others.
BLOCK = 16


def kernels_of(code: str) -> list[tuple[str, str]]:
    """The names and sources of the Triton kernels in a file that PyTorch's compiler wrote."""
    return re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)'''", code, re.DOTALL)


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
    """The arguments are those of `steps_of_a_small_model`."""
    name, on_triton = map(json.loads, sys.argv[1:])
    found = [
        [function, kernel, error_of(kernel, source)]
        for function, code in steps_of_a_small_model(name, on_triton).codes.items()
        for kernel, source in kernels_of(code)
    ]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
