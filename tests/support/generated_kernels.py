"""How many kernels PyTorch's compiler makes of a function on a GPU, counted without one.

The compiler's Triton backend can write its code for a CPU, too. It decides which operators share a
kernel in the same way as for a GPU, before anything is specific to the device. The code is written,
counted and not run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import torch
from torch._inductor import config
from torch._inductor.graph import GraphLowering
from torch.utils import _triton

# Lines of the generated code that launch something: our own kernels, and PyTorch's.
LAUNCHES = (".run(", "extern_kernels.", "torch.ops.", "aten.")


class _WrittenError(Exception):
    """The code is written."""


def generated_code(
    function: Callable[..., Any], *args: Any, dynamic: bool | None, options: Mapping[str, Any]
) -> str:
    """The code that PyTorch's compiler writes for a GPU when the function gets these arguments.

    The function is not run. `dynamic` and `options` are those of ``torch.compile``.
    """
    codes: list[str] = []

    def write(graph: GraphLowering) -> None:
        codes.append(graph.codegen()[0].value)
        raise _WrittenError

    torch._dynamo.reset()
    with (
        config.patch(cpu_backend="triton", fx_graph_cache=False),
        mock.patch.object(_triton, "triton_hash_with_backend", lambda: "none"),
        mock.patch.object(GraphLowering, "compile_to_module", write),
    ):
        try:
            torch.compile(function, dynamic=dynamic, fullgraph=True, options=options)(*args)
        except Exception:
            if len(codes) != 1:
                raise
    torch._dynamo.reset()
    (code,) = codes
    return code


def generated_kernels(code: str) -> list[str]:
    """The lines of `generated_code` that launch kernels."""
    lines = [line.strip() for line in code[code.index("def call(") :].splitlines()]
    return [
        line
        for line in lines
        if any(launch in line for launch in LAUNCHES)
        and not line.startswith(("#", "assert_", "del "))
    ]
