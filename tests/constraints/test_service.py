"""Compiling elsewhere: the same automata, once each; what is hostile costs its sender only."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest

from tests.constraints.helpers import pieces, record
from tests.constraints.pools import (
    LIMITS,
    NAME,
    compile_in,
    cpu_seconds,
    fork_of,
    slow,
    wait_until_gone,
)
from vllm_dllm.constraints.automaton.compilation import Constraint, compile_constraint
from vllm_dllm.constraints.limits import BusyError, CompileLimits, ConstraintError
from vllm_dllm.constraints.service.pool import CompilerPool


def test_the_same_automaton_as_in_this_process(compiler: CompilerPool) -> None:
    got, expected = compile_in(compiler, NAME), compile_constraint(NAME, pieces(), LIMITS)
    assert got.facts == expected.facts
    assert got.packed == expected.packed


def test_equal_constraints_are_compiled_once(compiler: CompilerPool) -> None:
    assert compile_in(compiler, NAME) is compile_in(compiler, NAME)
    assert compiler.submit(NAME).done()
    same = Constraint.of("json_schema", json.dumps(record(name={"type": "string"})))
    assert compile_in(compiler, same) is compile_in(compiler, NAME)
    spaced = Constraint.of("json_schema", record(name={"type": "string"}), whitespace="")
    assert compile_in(compiler, spaced) is not compile_in(compiler, NAME)


def test_refusals_come_back_with_their_reason(compiler: CompilerPool) -> None:
    wrong = Constraint.of("json_schema", record(a={"type": "string", "minLength": "x"}))
    for _ in range(2):
        with pytest.raises(ConstraintError, match=r"\$\.a: minLength is a count"):
            compile_in(compiler, wrong)


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
    began = cpu_seconds(compiler)
    try:
        compile_in(compiler, Constraint.of(kind, value))
    except ConstraintError as error:
        assert name not in HARMLESS, error
        assert str(error)
        assert len(str(error)) < 1500, "no message repeats what it was sent"
    else:
        assert name in HARMLESS, "this one is refused"
    assert cpu_seconds(compiler) - began < 2.0
    assert compile_in(compiler, NAME).minimum > 1, "the next one is served"


def test_ten_megabytes_are_refused_at_once(compiler: CompilerPool) -> None:
    schema = {"enum": ["x" * 100 for _ in range(100_000)]}
    began = time.process_time()
    for value in (schema, json.dumps(schema)):
        with pytest.raises(ConstraintError, match="characters long, at most 262144"):
            compile_in(compiler, Constraint.of("json_schema", value))
    assert time.process_time() - began < 2.0
    deep: Any = {}
    for _ in range(100_000):
        deep = {"items": deep}
    with pytest.raises(ConstraintError, match="not JSON"):
        Constraint.of("json_schema", deep)


def test_a_slow_constraint_holds_no_other_up(compiler: CompilerPool) -> None:
    """With two processes. And it is compiled once, however often it is sent."""
    slow = Constraint.of("regex", "(a|b)*a(a|b){24}c")
    future = compiler.submit(slow)
    compile_in(compiler, Constraint.of("regex", "abc+"))
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
    compiler = CompilerPool(
        pieces(), CompileLimits(memory_bytes=64 << 20, cpu_seconds=30), processes=1
    )
    try:
        with pytest.raises(ConstraintError, match="more than 64 MiB"):
            compile_in(compiler, Constraint.of("regex", "(a|b)*a(a|b){22}"))
        assert compile_in(compiler, Constraint.of("regex", "a|b"))
    finally:
        compiler.close()


def test_closing_leaves_nothing_behind() -> None:
    compiler = CompilerPool(pieces(), CompileLimits(cpu_seconds=60), processes=1)
    compile_in(compiler, NAME)
    (process,) = compiler._processes
    pending = [compiler.submit(slow(n)) for n in range(2)]
    worker = fork_of(process)
    compiler.close()
    assert process.process.poll() is not None
    assert wait_until_gone(worker)
    for future in pending:
        with pytest.raises(BusyError, match="closing"):
            future.result(timeout=1)
    with pytest.raises(BusyError, match="closing"):
        compile_in(compiler, Constraint.of("regex", "x"))
    assert not [t for t in threading.enumerate() if t in compiler._threads]
