"""Clients of a `CompilerPool` take turns."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.constraints.helpers import pieces
from tests.constraints.pools import (
    NAME,
    compile_in,
    fork_of,
    slow,
)
from vllm_dllm.constraints.automaton.compilation import Constraint
from vllm_dllm.constraints.limits import BusyError, CompileLimits, ConstraintError
from vllm_dllm.constraints.service.pool import CompilerPool

# ---- turns


def test_what_is_compiled_never_waits_and_new_ones_wait_in_turn(compiler: CompilerPool) -> None:
    """One client sends a hundred constraints that take too long."""
    compile_in(compiler, NAME)
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
    one = CompilerPool(
        pieces(),
        CompileLimits(cpu_seconds=300, wall_seconds=300, turn_seconds=300, most_waiting=4),
        processes=1,
    )
    try:
        compile_in(one, NAME)
        running = one.submit(slow(), ("flood", ""))
        fork_of(one._processes[0])
        flood = [one.submit(slow(n), ("flood", "")) for n in range(1, 5)]
        with pytest.raises(BusyError, match="too many constraints wait"):
            one.submit(slow(5), ("flood", ""))
        other = one.submit(slow(6), ("other", ""))
        with pytest.raises(BusyError, match="others wait for their constraints"):
            flood[-1].result(timeout=1)
        assert not any(future.done() for future in (running, other, *flood[:-1]))
    finally:
        one.close()


def test_equal_constraints_of_several_clients_are_one(one: CompilerPool) -> None:
    """Whoever's turn comes first takes the others along."""
    compile_in(one, NAME)
    held = one.submit(slow(), ("a", ""))
    wanted = Constraint.of("regex", "xyz*")
    futures = [one.submit(wanted, (name, "")) for name in ("a", "b", "b")]
    assert futures[1] is futures[2] is not futures[0]
    for _ in range(2):
        os.kill(fork_of(one._processes[0]), signal.SIGKILL)
        time.sleep(0.05)
    assert isinstance(held.exception(timeout=5), BusyError)
    assert futures[0].result() is futures[1].result()
