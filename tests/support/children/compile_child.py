"""Compile Triton kernels for a GPU that is not here, in a process of their own.

Tests call `compiled`. It runs this file as a child process without TRITON_INTERPRET, which compiles
each kernel for compute capability 9.0 and reads the report of ptxas.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
CAPABILITY = 90


@dataclass(frozen=True)
class Case:
    """One specialisation of a kernel.

    Attributes:
        module, kernel: where the kernel is, and its name.
        types: Triton's type ("*bf16", "i32", "fp32") of each argument that is not a constant.
        constants: the values of the other arguments.
        unaligned: arguments of `types` that are not known to be multiples of 16.
        options: ``num_warps``, ``num_stages``.
    """

    module: str
    kernel: str
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    unaligned: Sequence[str] = ()
    options: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes of a GPU.

    Attributes:
        shared: bytes of shared memory of a program.
        registers: registers of a thread.
        spilled: bytes that a thread stores to and loads from local memory for lack of registers.
        stack: bytes of a thread's stack frame.
        matrix: names of the matrix instructions that it uses.
    """

    shared: int
    registers: int
    spilled: int
    stack: int
    matrix: Sequence[str]


def compiled(cases: Mapping[str, Case]) -> dict[str, Resources]:
    """Resources of each case.

    Raises:
        RuntimeError: one does not compile; with the compiler's message.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {
        "OMP_NUM_THREADS": "1",
        "TRITON_ALWAYS_COMPILE": "1",  # kernels from Triton's cache come without a report
        "TRITON_DEFAULT_FP_FUSION": "1",  # the default until Triton 3.9, which warns of the change
    }
    done = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps({name: asdict(case) for name, case in cases.items()}),
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"compiling failed:\n{done.stderr[-4000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return {name: Resources(**resources) for name, resources in found.items()}


def _compile(case: Case) -> Resources:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(case.module), case.kernel)
    names = kernel.arg_names
    known = set(case.types) | set(case.constants)
    if known != set(names):
        raise ValueError(f"{case.kernel}: {sorted(known ^ set(names))} do not match its arguments")
    source = ASTSource(
        fn=kernel,
        signature={name: case.types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in case.constants.items()},
        attrs={
            (names.index(name),): [["tt.divisibility", 16]]
            for name, kind in case.types.items()
            if name not in case.unaligned and kind[0] in "*i"
        },
    )
    target = GPUTarget("cuda", CAPABILITY, 32)
    # Triton prints the report of ptxas on the code that it keeps.
    triton.knobs.nvidia.dump_ptxas_log = True
    with redirect_stdout(StringIO()) as log:
        found = triton.compile(source, target=target, options=dict(case.options))
    return _resources(log.getvalue(), found.asm["ptx"], found.metadata.shared)


def _resources(log: str, ptx: str, shared: int) -> Resources:
    return Resources(
        shared=shared,
        registers=int(re.findall(r"Used (\d+) registers", log)[0]),
        spilled=sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", log))),
        stack=int(re.findall(r"(\d+) bytes stack frame", log)[0]),
        matrix=sorted(set(re.findall(r"\b(wgmma\.mma_async|mma\.sync)\b", ptx))),
    )


def main() -> None:
    cases = {name: Case(**case) for name, case in json.loads(sys.stdin.read()).items()}
    print(json.dumps({name: asdict(_compile(case)) for name, case in cases.items()}))


if __name__ == "__main__":
    main()
