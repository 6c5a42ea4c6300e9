"""Compiling elsewhere: the same automata, once each; what is hostile costs its sender only."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from zoneinfo import available_timezones

import pytest
from canvas_grammar import CompileLimits, ConstraintError
from canvas_grammar.automaton.compilation import Constraint, compile_constraint
from canvas_grammar.automaton.compiled import CompiledConstraint
from canvas_grammar.pool import BusyError, CompilerPool, PoolLimits
from canvas_grammar_support.helpers import pieces, record

pytestmark = pytest.mark.slow  # the tests start processes
NAME = Constraint.from_value("json_schema", record(name={"type": "string"}))


def process_of(pool: CompilerPool, number: int = 0) -> int:
    """The id of one of a pool's processes, once it has started."""
    for _ in range(2000):
        if (process := pool._processes[number]._process) is not None:
            return process.pid
        time.sleep(0.01)
    raise AssertionError("nothing has been compiled")


def regex(pattern: str) -> Constraint:
    return Constraint.from_value("regex", pattern)


def slow(n: int = 0) -> Constraint:
    """A constraint that takes minutes to compile."""
    return regex(f"(a|b)*a(a|b){{26}}c{{{n + 1}}}")


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


@pytest.fixture(scope="module")
def compiler() -> Iterator[CompilerPool]:
    # A process uses up little memory sooner, and no constraint that is served needs more.
    with closing(CompilerPool(pieces, PoolLimits(memory_bytes=192 << 20))) as found:
        # Both processes start here, because that takes CPU time, too.
        for future in [found.submit(regex(letter)) for letter in "ab"]:
            future.result()
        yield found


@pytest.fixture
def one() -> Iterator[CompilerPool]:
    """A process that needs a kill to get anywhere: nothing is too slow or too large for it."""
    limits = PoolLimits(share_seconds=300, memory_bytes=1 << 40, wait_seconds=0.5)
    with closing(CompilerPool(pieces, limits, processes=1)) as found:
        yield found


def test_the_same_automaton_as_in_this_process(compiler: CompilerPool) -> None:
    got, expected = compile_in(compiler, NAME), compile_constraint(NAME, pieces(), CompileLimits())
    assert got.facts == expected.facts
    assert got.packed == expected.packed


def test_equal_constraints_are_compiled_once(compiler: CompilerPool) -> None:
    assert compile_in(compiler, NAME) is compile_in(compiler, NAME)
    assert compiler.submit(NAME).done()
    same = Constraint.from_value("json_schema", json.dumps(record(name={"type": "string"})))
    assert compile_in(compiler, same) is compile_in(compiler, NAME)
    spaced = Constraint.from_value("json_schema", record(name={"type": "string"}), whitespace="")
    assert compile_in(compiler, spaced) is not compile_in(compiler, NAME)


def test_refusals_come_back_with_their_reason(compiler: CompilerPool) -> None:
    wrong = Constraint.from_value("json_schema", record(a={"type": "string", "minLength": "x"}))
    for _ in range(2):
        with pytest.raises(ConstraintError, match=r"\$\.a: minLength is a count"):
            compile_in(compiler, wrong)


HOSTILE: dict[str, tuple[str, Any]] = {
    "invalid": ("regex", "(a"),
    "repetitions": ("regex", "((a{100}){100}){100}"),
    "repetitions of little": ("regex", "(((((a?){50}){50}){50}){50}){50}"),
    "exponential": ("regex", "(a|b)*a(a|b){24}"),
    "unicode": ("regex", r"(\w{1,60}|\S{1,60}|\W\s){1,30}"),
    "empty choice": ("choice", []),
    "many choices": ("choice", [f"{n:x}" * 9 for n in range(20_000)]),
    "nested groups": ("regex", "(" * 40_000),
    "nested json": ("json_schema", '{"items":' * 25_000),
    "nested schema": ("json_schema", '{"type":"array","items":' * 9_000 + "{}" + "}" * 9_000),
    "any json": ("json_schema", {}),
    "many alternatives": ("json_schema", {"allOf": [
        {"anyOf": [{"required": [f"{name}{n}"], "properties": {f"{name}{n}": {"const": n}}}
                   for name in "ab"]} for n in range(30)]}),
    "many selections": ("json_schema", {"minProperties": 20, "additionalProperties": False,
                                        "properties": {str(n): {} for n in range(60)}}),
    "long strings": ("json_schema", {"type": "string", "minLength": 10**9}),
    "long array": ("json_schema", {"type": "array", "items": NAME.text, "minItems": 10**12}),
    "many properties": ("json_schema", {"properties": {str(n): {"type": "number"}
                                                       for n in range(3000)}}),
    "branching": ("json_schema", {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [
        {"type": "null"}, record(**{name: {"$ref": "#/$defs/a"} for name in "abcdefgh"})]}}}),
    "stacks of two kinds": ("grammar", """root ::= a
a ::= "(" a ")" | "(" b "]" | "x"
b ::= "(" b ")" | "(" a "]" | "y"
"""),
    "endless": ("grammar", 'root ::= "a" root'),
    "repeated rule": ("grammar", 'root ::= (("a" root "b"){1000}){1000} | "c"'),
    "keyword": ("json_schema", {"items": {}, "uniqueItems": True, "minItems": 2}),
    "evil enum": ("json_schema", {"enum": [[[[["x" * 1000]]]] for _ in range(200)]}),
    "evil names": ("json_schema", {"type": "string", "x" * 100_000: 1}),
    "evil reference": ("json_schema", {"$ref": "#/" + "x" * 100_000}),
}  # fmt: skip
# They look costly, and are not.
HARMLESS = ("any json", "branching", "stacks of two kinds", "evil enum", "evil names")


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_constraints_are_refused(name: str, compiler: CompilerPool) -> None:
    kind, value = HOSTILE[name]
    try:
        compile_in(compiler, Constraint.from_value(kind, value))
    except ConstraintError as error:
        assert name not in HARMLESS, error
        assert str(error)
        assert len(str(error)) < 1500, "no message repeats what it was sent"
    else:
        assert name in HARMLESS, "this one is refused"
    assert compile_in(compiler, NAME).minimum > 1, "the next one is served"


def test_ten_megabytes_are_refused_at_once(compiler: CompilerPool) -> None:
    schema = {"enum": ["x" * 100 for _ in range(100_000)]}
    began = time.process_time()
    for value in (schema, json.dumps(schema)):
        with pytest.raises(ConstraintError, match="characters long, at most 262144"):
            compile_in(compiler, Constraint.from_value("json_schema", value))
    assert time.process_time() - began < 2.0
    deep: Any = {}
    for _ in range(100_000):
        deep = {"items": deep}
    with pytest.raises(ConstraintError, match="not JSON"):
        Constraint.from_value("json_schema", deep)


def test_a_slow_constraint_holds_no_other_up(compiler: CompilerPool) -> None:
    """With two processes. And it is compiled once, however often it is sent."""
    constraint = slow()
    future = compiler.submit(constraint)
    assert compiler.submit(constraint) is future
    compile_in(compiler, regex("abc+"))
    assert not future.done()
    message = "more than 192 MiB to compile; make it smaller"
    with pytest.raises(ConstraintError, match=message):
        future.result()
    again = compiler.submit(constraint)
    assert again.done()
    with pytest.raises(ConstraintError, match=message):
        again.result()


def test_a_flood_of_one_client_is_not_felt_by_others() -> None:
    """Catches a queue that served whoever came first, with 503 for everybody after a flood."""
    with closing(CompilerPool(pieces, PoolLimits(share_seconds=0.2, wait_seconds=15))) as compiler:
        flood = [compiler.submit(slow(n), False, "hostile") for n in range(40)]
        for n in range(3):
            began = time.monotonic()
            wanted = regex(f"a{{{n + 1}}}b+")
            assert compiler.submit(wanted, False, f"client {n}").result(timeout=20)
            assert time.monotonic() - began < 8, "a share, and the start of a process"
        assert not all(each.done() for each in flood)


LONG = Constraint.from_value(
    "json_schema", {"type": "array", "items": {"enum": sorted(available_timezones())}}
)


def test_what_was_interrupted_is_compiled_later() -> None:
    """Its status is the same, whoever waits; a share that is too short grows."""
    with closing(CompilerPool(pieces, PoolLimits(share_seconds=0.05), processes=1)) as compiler:
        compile_in(compiler, NAME)
        done: list[int] = []
        wanted = [LONG, *(regex(f"x{{{n}}}") for n in range(1, 4))]
        sent = [compiler.submit(each, client=str(n)) for n, each in enumerate(wanted)]
        for n, each in enumerate(sent):
            each.add_done_callback(lambda _, n=n: done.append(n))
        assert [each.result(timeout=60).minimum > 1 for each in sent] == [True] * 4
        assert done == [1, 2, 3, 0]
        assert not compiler._used, "nothing is kept of who has gone"


def test_whoever_joins_a_constraint_lends_it_a_turn(one: CompilerPool) -> None:
    held = one.submit(slow(), client="hostile")
    one.submit(slow(1), client="hostile")
    shared = one.submit(regex("s"), client="hostile")
    one._used["hostile"] = 100.0
    other = one.submit(regex("o"), client="other")
    one._used["other"] = 1.0
    assert one.submit(regex("s"), client="new") is shared
    one._used["new"] = 0.0
    with one._lock:
        first = one._next()
        assert first is not None and first.future is shared
        second = one._next()
        assert second is not None and second.future is other
    assert not held.done()


def test_the_cache_has_a_size(monkeypatch: pytest.MonkeyPatch, compiler: CompilerPool) -> None:
    """What was not sent for longest is compiled anew."""
    compile_in(compiler, NAME)
    monkeypatch.setattr("canvas_grammar.pool.CACHE_BYTES", 0)
    other = regex("xy+")
    compile_in(compiler, other)
    assert compiler.submit(other).done()
    assert not compiler.submit(NAME).done()
    assert compile_in(compiler, NAME)


def test_only_the_patient_wait_for_long(one: CompilerPool) -> None:
    """What is compiled never waits; what is not compiled in time gets no verdict."""
    compile_in(one, NAME)
    held = one.submit(slow())
    hurried = one.submit(regex("x"), patient=False)
    patient = one.submit(regex("y"))
    joined = one.submit(regex("z"), patient=False)
    assert one.submit(regex("z")) is joined, "whoever joins may be patient"
    assert one.submit(NAME, patient=False).done()
    time.sleep(one.limits.wait_seconds)
    for _ in range(2):
        os.kill(fork_of(process_of(one)), signal.SIGKILL)
        time.sleep(0.1)
    with pytest.raises(BusyError, match="was killed"):
        held.result(timeout=20)
    with pytest.raises(BusyError, match=r"waited for 0\.5 seconds .*: busy, try again"):
        hurried.result(timeout=20)
    assert patient.result(timeout=20)
    assert joined.result(timeout=20)
    assert one.submit(regex("x"), patient=False).result(timeout=20)


@pytest.mark.parametrize("victim", ["fork", "process"])
def test_a_constraint_whose_process_is_killed_is_not_too_slow(
    compiler: CompilerPool, victim: str
) -> None:
    """It is compiled once more; a pool without processes recovers."""
    compile_in(compiler, NAME)
    future = compiler.submit(slow(1 if victim == "fork" else 2))
    for process in compiler._processes:
        if process._process is not None:
            children = Path(f"/proc/{process._process.pid}/task/{process._process.pid}/children")
            forks = [int(pid) for pid in children.read_text().split()]
            for pid in forks if victim == "fork" else [process._process.pid]:
                os.kill(pid, signal.SIGKILL)
    with pytest.raises(ConstraintError, match="MiB"):
        future.result(timeout=60)
    assert compile_in(compiler, regex(f"abc {victim}"))


def test_a_process_that_does_not_start_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(CompilerPool(pieces, processes=1)) as compiler:
        with monkeypatch.context() as broken:
            broken.setattr("sys.executable", "/bin/false")
            with pytest.raises(BusyError, match="try again"):
                compile_in(compiler, NAME)
        assert compile_in(compiler, NAME)


def test_a_vocabulary_that_cannot_be_read_refuses_every_constraint() -> None:
    def read() -> Any:
        raise ConstraintError("an unknown decoder")

    compiler = CompilerPool(read, processes=1)
    for pattern in ("a", "b"):
        with pytest.raises(ConstraintError, match="an unknown decoder"):
            compile_in(compiler, regex(pattern))
    compiler.close()


def test_closing_leaves_nothing() -> None:
    threads = set(threading.enumerate())
    compiler = CompilerPool(pieces, PoolLimits(), processes=1)
    compile_in(compiler, NAME)
    pending = [compiler.submit(slow(n)) for n in range(2)]
    process = process_of(compiler)
    fork = fork_of(process)
    compiler.close()
    assert not Path(f"/proc/{process}").exists()
    assert wait_until_gone(fork)
    for future in pending:
        with pytest.raises(BusyError, match="their pool is closed"):
            future.result(timeout=1)
    with pytest.raises(BusyError, match="their pool is closed"):
        compiler.submit(NAME)
    for thread in set(threading.enumerate()) - threads:
        thread.join(5)
        assert not thread.is_alive()
