"""Test helper: constraints for a `CompilerPool`, and a look at its processes."""

from __future__ import annotations

import os
import time
from pathlib import Path

from canvas_grammar.automaton.compilation import Constraint
from canvas_grammar.automaton.compiled import CompiledConstraint
from canvas_grammar.pool import CompilerPool

from canvas_grammar_support.helpers import record

NAME = Constraint.from_value("json_schema", record(name={"type": "string"}))


def process_of(pool: CompilerPool, number: int = 0) -> int:
    """The id of one of a pool's processes, once it has started."""
    for _ in range(2000):
        if (process := pool._processes[number]._process) is not None:
            return process.pid
        time.sleep(0.01)
    raise AssertionError("nothing has been compiled")


def cpu_seconds(pool: CompilerPool) -> float:
    """CPU time of the processes and of those of their forks that have ended."""
    total = 0.0
    for process in pool._processes:
        if process._process is not None:
            stat = Path(f"/proc/{process._process.pid}/stat").read_text().rpartition(")")[2].split()
            total += sum(map(int, stat[11:15])) / os.sysconf("SC_CLK_TCK")
    return total


def slow(n: int = 0) -> Constraint:
    """A constraint that takes minutes to compile."""
    return Constraint.from_value("regex", f"(a|b)*a(a|b){{26}}c{{{n + 1}}}")


def fork_of(pid: int) -> int:
    """The fork of a pool's process that is compiling, once there is one."""
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
