"""Compiling elsewhere: the same automata, once each; what is hostile costs its sender only."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.constraints.helpers import pieces, record
from vllm_dllm.constraints.automaton.compilation import Constraint, compiled
from vllm_dllm.constraints.limits import BusyError, ConstraintError, Limits
from vllm_dllm.constraints.service.pool import Compiler
from vllm_dllm.constraints.service.process import Process

LIMITS = Limits()
NAME = Constraint.of("json_schema", record(name={"type": "string"}))


@pytest.fixture(scope="module")
def compiler() -> Iterator[Compiler]:
    found = Compiler(pieces())
    found.warm()
    yield found
    found.close()


def test_the_same_automaton_as_in_this_process(compiler: Compiler) -> None:
    got, expected = compiler.compile(NAME), compiled(NAME, pieces(), LIMITS)
    for name, array in vars(expected).items():
        np.testing.assert_array_equal(getattr(got, name), array)


def test_equal_constraints_are_compiled_once(compiler: Compiler) -> None:
    assert compiler.compile(NAME) is compiler.compile(NAME)
    assert compiler.submit(NAME).done()
    same = Constraint.of("json_schema", json.dumps(record(name={"type": "string"})))
    assert compiler.compile(same) is compiler.compile(NAME)
    spaced = Constraint.of("json_schema", record(name={"type": "string"}), whitespace="")
    assert compiler.compile(spaced) is not compiler.compile(NAME)


def test_refusals_come_back_with_their_reason(compiler: Compiler) -> None:
    wrong = Constraint.of("json_schema", record(a={"type": "string", "nullable": True}))
    for _ in range(2):
        with pytest.raises(ConstraintError, match=r"\$\.a: keyword nullable is not supported"):
            compiler.compile(wrong)


HOSTILE: dict[str, tuple[str, Any]] = {
    "invalid": ("regex", "(a"),
    "repetitions": ("regex", "((a{100}){100}){100}"),
    "repetitions of little": ("regex", "(((((a?){50}){50}){50}){50}){50}"),
    "exponential": ("regex", "(a|b)*a(a|b){24}"),
    "exponential words": ("regex", r"(\w|b)*a\w{30}"),
    "unicode": ("regex", r"(\w{1,60}|\S{1,60}|\W\s){1,30}"),
    "empty choice": ("choice", []),
    "many choices": ("choice", [f"{n:x}" * 9 for n in range(20_000)]),
    "nested groups": ("regex", "(" * 40_000),
    "nested json": ("json_schema", '{"items":' * 25_000),
    "nested schema": ("json_schema", '{"type":"array","items":' * 9_000 + "{}" + "}" * 9_000),
    "any json": ("json_schema", {}),
    "long strings": ("json_schema", {"type": "string", "minLength": 10**9}),
    "long array": ("json_schema", {"type": "array", "items": NAME.text, "minItems": 10**12}),
    "many properties": ("json_schema", {"properties": {str(n): {"type": "number"}
                                                       for n in range(3000)}}),
    "branching": ("json_schema", {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [
        {"type": "null"}, record(**{name: {"$ref": "#/$defs/a"} for name in "abcdefgh"})]}}}),
    "keyword": ("json_schema", {"type": "array", "items": {"type": "null"}, "uniqueItems": True}),
    "evil enum": ("json_schema", {"enum": [[[[["x" * 1000]]]] for _ in range(200)]}),
    "evil names": ("json_schema", {"type": "string", "x" * 100_000: 1}),
}  # fmt: skip


def cpu_seconds(compiler: Compiler) -> float:
    """CPU time of the processes and of the workers that have ended."""
    total = 0.0
    for process in compiler._processes:
        stat = Path(f"/proc/{process.process.pid}/stat").read_text().rpartition(")")[2].split()
        total += sum(map(int, stat[11:15])) / os.sysconf("SC_CLK_TCK")
    return total


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_constraints_are_refused(name: str, compiler: Compiler) -> None:
    kind, value = HOSTILE[name]
    began = cpu_seconds(compiler)
    try:
        compiler.compile(Constraint.of(kind, value))
    except ConstraintError as error:
        assert str(error)
        assert len(str(error)) < 1500, "no message repeats what it was sent"
    else:
        assert name in ("evil enum",), "this one is refused"
    assert cpu_seconds(compiler) - began < 2.0
    assert compiler.compile(NAME).minimum > 1, "the next one is served"


def test_ten_megabytes_are_refused_at_once(compiler: Compiler) -> None:
    schema = {"enum": ["x" * 100 for _ in range(100_000)]}
    began = time.process_time()
    for value in (schema, json.dumps(schema)):
        with pytest.raises(ConstraintError, match="characters long, at most 262144"):
            compiler.compile(Constraint.of("json_schema", value))
    assert time.process_time() - began < 2.0
    deep: Any = {}
    for _ in range(100_000):
        deep = {"items": deep}
    with pytest.raises(ConstraintError, match="not JSON"):
        Constraint.of("json_schema", deep)


def test_a_slow_constraint_holds_no_other_up(compiler: Compiler) -> None:
    """With two processes. And it is compiled once, however often it is sent."""
    slow = Constraint.of("regex", "(a|b)*a(a|b){24}c")
    future = compiler.submit(slow)
    compiler.compile(Constraint.of("regex", "abc+"))
    assert not future.done()
    used = cpu_seconds(compiler)
    message = r"more than 1\.5 seconds of CPU time to compile; make it smaller"
    with pytest.raises(ConstraintError, match=message):
        future.result()
    assert 1.4 < cpu_seconds(compiler) - used < 1.9
    again = compiler.submit(slow)
    assert again.done()
    with pytest.raises(ConstraintError, match=message):
        again.result()


def test_memory_is_bounded() -> None:
    compiler = Compiler(pieces(), Limits(memory=64 << 20, seconds=30), processes=1)
    try:
        with pytest.raises(ConstraintError, match="more than 64 MiB"):
            compiler.compile(Constraint.of("regex", "(a|b)*a(a|b){22}"))
        assert compiler.compile(NAME)
    finally:
        compiler.close()


def test_a_process_that_did_not_start_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler(pieces(), processes=1)
    try:
        with monkeypatch.context() as broken:
            broken.setattr("sys.executable", "/bin/false")
            with pytest.raises(BusyError, match="did not start"):
                compiler.compile(NAME)
        assert compiler.compile(NAME)
    finally:
        compiler.close()


def test_closing_leaves_nothing_behind() -> None:
    compiler = Compiler(pieces(), Limits(seconds=60), processes=1)
    compiler.compile(NAME)
    (process,) = compiler._processes
    pending = [compiler.submit(slow(n)) for n in range(2)]
    worker = worker_of(process)
    compiler.close()
    assert process.process.poll() is not None
    assert wait_until_gone(worker)
    for future in pending:
        with pytest.raises(BusyError, match="closing"):
            future.result(timeout=1)
    with pytest.raises(BusyError, match="closing"):
        compiler.compile(Constraint.of("regex", "x"))
    assert not [t for t in threading.enumerate() if t in compiler._threads]


# ---- what says nothing about a constraint


def slow(n: int = 0) -> Constraint:
    """One that takes minutes."""
    return Constraint.of("regex", f"(a|b)*a(a|b){{26}}c{{{n + 1}}}")


def worker_of(process: Process) -> int:
    """The worker that is compiling, once there is one."""
    pid = process.process.pid
    for _ in range(2000):
        if found := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            return int(found[0])
        time.sleep(0.01)
    raise AssertionError("nothing is being compiled")


def wait_until_gone(pid: int) -> bool:
    """Gone, or dead and not yet buried by whoever inherits it."""
    for _ in range(2000):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False


@pytest.fixture
def one() -> Iterator[Compiler]:
    """A process that needs a kill to get anywhere: nothing is too slow for it."""
    found = Compiler(pieces(), Limits(seconds=300, wall=300), processes=1)
    yield found
    found.close()


def test_a_worker_that_is_killed_once_is_no_news() -> None:
    compiler = Compiler(pieces(), Limits(seconds=1), processes=1)
    try:
        future = compiler.submit(slow())
        while not compiler._processes:
            time.sleep(0.01)
        os.kill(worker_of(compiler._processes[0]), signal.SIGKILL)
        with pytest.raises(ConstraintError, match="more than 1 seconds of CPU time"):
            future.result()
    finally:
        compiler.close()


@pytest.mark.parametrize("victim", ["worker", "process"])
def test_a_constraint_whose_process_is_killed_is_not_too_slow(one: Compiler, victim: str) -> None:
    """Twice; the third time it is left alone."""
    one.compile(NAME)
    constraint = slow()
    future = one.submit(constraint)
    last = 0
    for _ in range(2):
        while not one._processes or (worker := worker_of(one._processes[0])) == last:
            time.sleep(0.01)
        last = worker
        os.kill(worker if victim == "worker" else one._processes[0].process.pid, signal.SIGKILL)
        if victim == "process":
            # It dies with the process: nobody would count its CPU time.
            assert wait_until_gone(worker)
    with pytest.raises(BusyError, match="was killed; busy, try again"):
        future.result()
    assert one.compile(Constraint.of("regex", "abc")), "the next one is served"
    assert not one.submit(constraint).done(), "and this one may be asked again"


def test_a_machine_that_is_too_busy_is_no_verdict() -> None:
    compiler = Compiler(pieces(), Limits(seconds=300, wall=0.3), processes=1)
    try:
        with pytest.raises(BusyError, match=r"within 0\.3 seconds: the machine is busy, try again"):
            compiler.compile(slow())
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
    compiler = Compiler(pieces())
    try:
        for constraint in ORDINARY:
            assert compiler.compile(constraint).states > 1
        with pytest.raises(ConstraintError, match="CPU time"):
            compiler.compile(slow())
    finally:
        for process in busy:
            process.kill()
            process.wait()
        compiler.close()


# ---- turns


def test_what_is_compiled_never_waits_and_new_ones_wait_in_turn(compiler: Compiler) -> None:
    """One client sends a hundred constraints that take too long."""
    compiler.compile(NAME)
    flood = [compiler.submit(slow(n), ("flood", "")) for n in range(100)]
    began = time.monotonic()
    assert compiler.submit(NAME, ("other", "")).done()
    assert time.monotonic() - began < 0.1
    for n in range(3):
        began = time.monotonic()
        assert compiler.submit(Constraint.of("regex", f"a{{{n + 7}}}"), ("other", "")).result()
        assert time.monotonic() - began < 5.0
    found = [future.exception(timeout=30) for future in flood]
    slow_ones = [error for error in found if isinstance(error, ConstraintError)]
    busy = [error for error in found if isinstance(error, BusyError)]
    assert len(slow_ones) + len(busy) == 100
    assert 1 <= len(slow_ones) < 20
    assert "did not come within 5 seconds: busy, try again" in str(busy[0])
    assert compiler.submit(NAME).done(), "what is compiled is still there"


def test_a_full_queue_takes_no_more_but_from_who_has_less() -> None:
    one = Compiler(pieces(), Limits(seconds=300, wall=300, wait=300, waiting=4), processes=1)
    try:
        one.compile(NAME)
        running = one.submit(slow(), ("flood", ""))
        worker_of(one._processes[0])
        flood = [one.submit(slow(n), ("flood", "")) for n in range(1, 5)]
        with pytest.raises(BusyError, match="too many constraints wait"):
            one.submit(slow(5), ("flood", ""))
        other = one.submit(slow(6), ("other", ""))
        with pytest.raises(BusyError, match="others wait for their constraints"):
            flood[-1].result(timeout=1)
        assert not any(future.done() for future in (running, other, *flood[:-1]))
    finally:
        one.close()


def test_equal_constraints_of_several_clients_are_one(one: Compiler) -> None:
    """Whoever's turn comes first takes the others along."""
    one.compile(NAME)
    held = one.submit(slow(), ("a", ""))
    wanted = Constraint.of("regex", "xyz*")
    futures = [one.submit(wanted, (name, "")) for name in ("a", "b", "b")]
    assert futures[1] is futures[2] is not futures[0]
    for _ in range(2):
        os.kill(worker_of(one._processes[0]), signal.SIGKILL)
        time.sleep(0.05)
    assert isinstance(held.exception(timeout=5), BusyError)
    assert futures[0].result() is futures[1].result()
