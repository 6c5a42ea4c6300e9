"""Test helper: constraints for a `CompilerPool`, and a look at its processes."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tests.constraints.helpers import record
from vllm_dllm.constraints.automaton.compilation import Constraint
from vllm_dllm.constraints.automaton.compiled import CompiledConstraint
from vllm_dllm.constraints.limits import CompileLimits
from vllm_dllm.constraints.service.pool import CompilerPool
from vllm_dllm.constraints.service.process import WorkerProcess

LIMITS = CompileLimits()
NAME = Constraint.of("json_schema", record(name={"type": "string"}))


def cpu_seconds(compiler: CompilerPool) -> float:
    """CPU time of the worker processes and of those of their forks that have ended."""
    total = 0.0
    for process in compiler._processes:
        stat = Path(f"/proc/{process.process.pid}/stat").read_text().rpartition(")")[2].split()
        total += sum(map(int, stat[11:15])) / os.sysconf("SC_CLK_TCK")
    return total


def slow(n: int = 0) -> Constraint:
    """A constraint that takes minutes to compile."""
    return Constraint.of("regex", f"(a|b)*a(a|b){{26}}c{{{n + 1}}}")


def fork_of(process: WorkerProcess) -> int:
    """The fork of a worker process that is compiling, once there is one."""
    pid = process.process.pid
    for _ in range(2000):
        if found := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            return int(found[0])
        time.sleep(0.01)
    raise AssertionError("nothing is being compiled")


def wait_until_gone(pid: int) -> bool:
    """Wait until a process is gone, or is a zombie that its new parent has yet to reap."""
    for _ in range(2000):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False


def compile_in(pool: CompilerPool, constraint: Constraint) -> CompiledConstraint:
    """What a constraint is compiled to; waits for it."""
    return pool.submit(constraint).result()
