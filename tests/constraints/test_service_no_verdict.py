"""What happens to a process that compiles, or to its machine, is no verdict on a constraint."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.constraints.helpers import pieces, record
from tests.constraints.pools import (
    NAME,
    compile_in,
    fork_of,
    slow,
    wait_until_gone,
)
from vllm_dllm.constraints.automaton.compilation import Constraint
from vllm_dllm.constraints.limits import BusyError, CompileLimits, ConstraintError
from vllm_dllm.constraints.service.pool import CompilerPool


def test_a_process_that_did_not_start_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = CompilerPool(pieces(), processes=1)
    try:
        with monkeypatch.context() as broken:
            broken.setattr("sys.executable", "/bin/false")
            with pytest.raises(BusyError, match="did not start"):
                compile_in(compiler, NAME)
        assert compile_in(compiler, NAME)
    finally:
        compiler.close()


def test_a_worker_that_is_killed_once_is_no_news() -> None:
    compiler = CompilerPool(pieces(), CompileLimits(cpu_seconds=1), processes=1)
    try:
        future = compiler.submit(slow())
        while not compiler._processes:
            time.sleep(0.01)
        os.kill(fork_of(compiler._processes[0]), signal.SIGKILL)
        with pytest.raises(ConstraintError, match="more than 1 seconds of CPU time"):
            future.result()
    finally:
        compiler.close()


@pytest.mark.parametrize("victim", ["worker", "process"])
def test_a_constraint_whose_process_is_killed_is_not_too_slow(
    one: CompilerPool, victim: str
) -> None:
    """Twice; the third time it is left alone."""
    compile_in(one, NAME)
    constraint = slow()
    future = one.submit(constraint)
    last = 0
    for _ in range(2):
        while not one._processes or (worker := fork_of(one._processes[0])) == last:
            time.sleep(0.01)
        last = worker
        os.kill(worker if victim == "worker" else one._processes[0].process.pid, signal.SIGKILL)
        if victim == "process":
            # It dies with the process: nobody would count its CPU time.
            assert wait_until_gone(worker)
    with pytest.raises(BusyError, match="was killed; busy, try again"):
        future.result()
    assert compile_in(one, Constraint.of("regex", "abc")), "the next one is served"
    assert not one.submit(constraint).done(), "and this one may be asked again"


def test_a_machine_that_is_too_busy_is_no_verdict() -> None:
    compiler = CompilerPool(pieces(), CompileLimits(cpu_seconds=300, wall_seconds=0.3), processes=1)
    try:
        with pytest.raises(BusyError, match=r"within 0\.3 seconds: the machine is busy, try again"):
            compile_in(compiler, slow())
        assert not compiler.submit(slow()).done()
    finally:
        compiler.close()


RECORD = record(
    name={"type": "string", "maxLength": 12},
    age={"type": "integer", "minimum": 0, "maximum": 130},
    tags={"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
)
# Of 10 to 400 ms of CPU time.
ORDINARY = [
    Constraint.of("json_schema", {"type": "array", "items": RECORD, "maxItems": most})
    for most in (1, 4, 8, 16, 24, 32)
]


def test_six_busy_processes_change_no_verdict() -> None:
    """In the session of whoever asks, as a server's engine is: Linux divides time by session."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(6)]
    compiler = CompilerPool(pieces())
    try:
        for constraint in ORDINARY:
            assert compile_in(compiler, constraint).minimum > 1
        with pytest.raises(ConstraintError, match="CPU time"):
            compile_in(compiler, slow())
    finally:
        for process in busy:
            process.kill()
            process.wait()
        compiler.close()
