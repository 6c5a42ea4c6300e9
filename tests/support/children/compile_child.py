"""Compile Triton kernels for a GPU that is not here, of compute capability 9.0.

This is done in a process of its own, without TRITON_INTERPRET.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field
from io import StringIO
from typing import Any

from tests.support.child import in_child

CAPABILITY = 90


@dataclass(frozen=True)
class Case:
    """One specialisation of a kernel.

    `types` has Triton's type ("*bf16", "i32", "fp32") of each argument that is not in `constants`,
    or a list of types for a tuple, with None where the tuple has it. Those that are not in
    `unaligned` are known to be multiples of 16.
    """

    module: str
    kernel: str
    types: Mapping[str, Any]
    constants: Mapping[str, Any]
    unaligned: Sequence[str] = ()
    options: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes of a GPU.

    A program's bytes of shared memory; a thread's registers, bytes that it spills, and bytes of its
    stack frame; and the matrix instructions that it uses.
    """

    shared: int
    registers: int
    spilled: int
    stack: int
    matrix: Sequence[str]


def compiled(cases: Mapping[str, Case]) -> dict[str, Resources]:
    """Resources of each case; an AssertionError has the compiler's message."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {
        "OMP_NUM_THREADS": "1",
        "TRITON_ALWAYS_COMPILE": "1",  # kernels from Triton's cache come without a report
        "TRITON_DEFAULT_FP_FUSION": "1",  # the default until Triton 3.9, which warns of the change
    }
    given = {name: asdict(case) for name, case in cases.items()}
    return {name: Resources(**found) for name, found in in_child(resources, given, env=environment)}


def resources(cases: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The name and the resources of each case, in the process without TRITON_INTERPRET."""
    for name, case in cases.items():
        yield name, asdict(_compile(Case(**case)))


def _compile(case: Case) -> Resources:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(case.module), case.kernel)
    names = kernel.arg_names
    known = set(case.types) | set(case.constants)
    if known != set(names):
        raise ValueError(f"{case.kernel}: {sorted(known ^ set(names))} do not match its arguments")
    signature = {name: _typed(case.types.get(name)) for name in names}
    leaves = {
        path: (name, kind)
        for name, types in case.types.items()
        for path, kind in _leaves((names.index(name),), types)
    }
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in case.constants.items()}
        | {path: None for path, (_, kind) in leaves.items() if kind is None},
        attrs={
            path: [["tt.divisibility", 16]]
            for path, (name, kind) in leaves.items()
            if kind is not None and name not in case.unaligned and kind[0] in "*i"
        },
    )
    target = GPUTarget("cuda", CAPABILITY, 32)
    # Triton prints the report of ptxas on the code that it keeps.
    triton.knobs.nvidia.dump_ptxas_log = True
    with redirect_stdout(StringIO()) as log:
        found = triton.compile(source, target=target, options=dict(case.options))
    return _resources(log.getvalue(), found.asm["ptx"], found.metadata.shared)


def _typed(kind: Any) -> Any:
    """A type, or a tuple of them, as Triton's signatures have it."""
    if isinstance(kind, list | tuple):
        return tuple(map(_typed, kind))
    return "constexpr" if kind is None else kind


def _leaves(path: tuple[int, ...], kind: Any) -> Iterator[tuple[tuple[int, ...], Any]]:
    """The types in a type, and where they are."""
    if not isinstance(kind, list | tuple):
        yield path, kind
        return
    for index, inner in enumerate(kind):
        yield from _leaves((*path, index), inner)


def _resources(log: str, ptx: str, shared: int) -> Resources:
    return Resources(
        shared=shared,
        registers=int(re.findall(r"Used (\d+) registers", log)[0]),
        spilled=sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", log))),
        stack=int(re.findall(r"(\d+) bytes stack frame", log)[0]),
        matrix=sorted(set(re.findall(r"\b(wgmma\.mma_async|mma\.sync)\b", ptx))),
    )
