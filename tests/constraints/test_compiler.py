"""Compiling elsewhere: the same automata, once each; hostile constraints cost two seconds."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.constraints.helpers import pieces, record
from vllm_dllm.constraints.build import Constraint, compiled
from vllm_dllm.constraints.compiler import Compiler
from vllm_dllm.constraints.limits import ConstraintError, Limits

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


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_constraints_are_refused_within_two_seconds(name: str, compiler: Compiler) -> None:
    compiler.warm()
    while len(compiler._idle) < 2:  # a child that was stopped is being replaced
        time.sleep(0.01)
    kind, value = HOSTILE[name]
    began = time.monotonic()
    try:
        compiler.compile(Constraint.of(kind, value))
    except ConstraintError as error:
        assert str(error)
        assert len(str(error)) < 1500, "no message repeats what it was sent"
    else:
        assert name in ("evil enum",), "this one is refused"
    assert time.monotonic() - began < 2.0
    assert compiler.compile(NAME).minimum > 1, "the next one is served"


def test_ten_megabytes_are_refused_at_once(compiler: Compiler) -> None:
    schema = {"enum": ["x" * 100 for _ in range(100_000)]}
    began = time.monotonic()
    for value in (schema, json.dumps(schema)):
        with pytest.raises(ConstraintError, match="characters long, at most 262144"):
            compiler.compile(Constraint.of("json_schema", value))
    assert time.monotonic() - began < 2.0
    deep: Any = {}
    for _ in range(100_000):
        deep = {"items": deep}
    with pytest.raises(ConstraintError, match="not JSON"):
        Constraint.of("json_schema", deep)


def test_a_slow_constraint_holds_no_other_up(compiler: Compiler) -> None:
    """With two processes; and what was too slow may be asked again."""
    slow = Constraint.of("regex", "(a|b)*a(a|b){24}c")
    future = compiler.submit(slow)
    began = time.monotonic()
    assert compiler.compile(Constraint.of("regex", "abc+")).minimum
    assert time.monotonic() - began < 1.0
    with pytest.raises(ConstraintError, match=r"more than 1\.5 seconds or 1024 MiB to compile"):
        future.result()
    assert compiler.submit(slow) is not future


def test_memory_is_bounded() -> None:
    compiler = Compiler(pieces(), Limits(memory=64 << 20, seconds=30), processes=1)
    try:
        with pytest.raises(ConstraintError, match=r"64 MiB|67108864 bytes"):
            compiler.compile(Constraint.of("regex", "(a|b)*a(a|b){22}"))
        assert compiler.compile(NAME)
    finally:
        compiler.close()


def test_a_child_that_did_not_start_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler(pieces(), processes=1)
    try:
        with monkeypatch.context() as broken:
            broken.setattr("sys.executable", "/bin/false")
            with pytest.raises(RuntimeError, match="did not start"):
                compiler.compile(NAME)
        assert compiler.compile(NAME)
    finally:
        compiler.close()


def test_closing_leaves_nothing_behind() -> None:
    compiler = Compiler(pieces(), processes=1)
    compiler.compile(NAME)
    (child,) = compiler._idle
    compiler.close()
    assert child.process.poll() is not None
    with pytest.raises((ConstraintError, RuntimeError)):
        compiler.compile(Constraint.of("regex", "x"))
    assert not [t for t in threading.enumerate() if t.name.startswith("constraints") and t.daemon]
