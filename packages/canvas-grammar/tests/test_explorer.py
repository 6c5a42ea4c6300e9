"""A process finds the same parts of constraints as this one, and may end at any time."""

from __future__ import annotations

import gc
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from canvas_grammar.automaton import explorer
from canvas_grammar.automaton.configurations import NO_STATE, START
from canvas_grammar.automaton.explorer import Explorer, Question
from canvas_grammar.automaton.parts import Part
from canvas_grammar.decoding import DistantSession, Session
from canvas_grammar_support.helpers import compiled, tiny

LENGTH, CPU = 16, torch.device("cpu")
TREE = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "inside": {"type": "array", "items": {"$ref": "#"}}},
}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The processes that were started."""
    found: list[subprocess.Popen[bytes]] = []
    start = explorer.start_process

    def watched(module: str) -> Any:
        process, connection = start(module)
        found.append(process)
        return process, connection

    monkeypatch.setattr(explorer, "start_process", watched)
    yield found
    gc.collect()
    assert [process.wait(timeout=20) for process in found if process.returncode != -9] in ([], [0])


def now(session: DistantSession, *asked: Any) -> tuple[Part, int]:
    found = session.find(*asked)
    return session.received(found.result(timeout=60)) if isinstance(found, Future) else found


def test_the_same_parts(started: list[subprocess.Popen[bytes]]) -> None:
    """From canvas to canvas, and after a request was preempted."""
    constraint = compiled("json_schema", TREE, tiny())
    here, asks = Session(constraint, LENGTH, CPU), Explorer()
    there, random, state = DistantSession(asks, constraint.packed, LENGTH, CPU), Random(1), START
    for _ in range(6):
        mine, its = here.find(state), now(there, state)
        assert mine[1] == its[1] and mine[0].whole == its[0].whole
        assert torch.equal(mine[0].automaton.numbers, its[0].automaton.numbers)
        assert np.array_equal(mine[0].states, its[0].states)
        assert there.find(state) == its, "it is known now"
        state = mine[0].state(random.randrange(len(mine[0].states) - 1))
    assert torch.equal(here.classes.numbers, there.classes.numbers)  # type: ignore[union-attr]
    text = [n + 1 for n in b'{"name": "ab']
    for before in (0, 5, len(text)):
        mine, its = (now(of, START, text[:before], text[before:]) for of in (here, there))  # type: ignore[arg-type]
        assert mine[1] == its[1]
        assert torch.equal(mine[0].automaton.numbers, its[0].automaton.numbers)
    assert now(there, NO_STATE)[1] == here.find(NO_STATE)[1]
    assert there.nbytes > here.nbytes / 4


def test_what_fails_ends_alone(started: list[subprocess.Popen[bytes]]) -> None:
    packed, asks = compiled("json_schema", TREE, tiny()).packed, Explorer()
    broken, sound = (DistantSession(asks, of, LENGTH, CPU) for of in (b"\0" * 9, packed))
    with pytest.raises(RuntimeError, match="Error"):
        now(broken, START)
    now(sound, START)
    assert not sound.ended and len(started) == 1
    del broken, sound
    gc.collect()
    with pytest.raises(RuntimeError, match="KeyError"):
        asks.ask(Question(1, None, START)).result(timeout=60)


def test_a_process_that_ends_is_replaced(started: list[subprocess.Popen[bytes]]) -> None:
    """What it knew is lost: requests that need it fail."""
    packed, asks = compiled("json_schema", TREE, tiny()).packed, Explorer()
    session = DistantSession(asks, packed, LENGTH, CPU)
    part, _ = now(session, START)
    started[0].kill()
    started[0].wait()
    for reason in ("has ended", "KeyError"):
        with pytest.raises(RuntimeError, match=reason):
            now(session, part.state(5))
    assert session.ended
    other = DistantSession(asks, packed, LENGTH, CPU)
    assert np.array_equal(now(other, START)[0].states, part.states)
    assert not other.ended and len(started) == 2
