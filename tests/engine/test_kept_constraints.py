"""A constraint outlives its requests: the next one with the same need not unpack or explore it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from canvas_grammar import CompileLimits, Constraint, Vocabulary
from canvas_grammar.automaton.compilation import compile_constraint

from vllm_dllm.engine import constraints
from vllm_dllm.engine.constraints import Constraints
from vllm_dllm.engine.slots import CanvasKind, SlotState
from vllm_dllm.selftest.steps import automaton
from vllm_dllm.vllm_seams.channels import Failure

IDS = (1000, 1100, 1200)  # of vocabularies, whose constraints differ


def entered(made: Constraints, slot: int, ids: int) -> object:
    made.enter(slot, automaton(ids), [])
    return made.sessions[slot]


@pytest.fixture
def made() -> Constraints:
    kind = CanvasKind(8, max(IDS), max(IDS) - 1, aligned=True)
    return Constraints(SlotState(4, kind, torch.device("cpu")))


def test_the_next_request_finds_it(made: Constraints) -> None:
    first = entered(made, 0, IDS[0])
    assert entered(made, 1, IDS[0]) is first
    made.leave(0)
    assert entered(made, 2, IDS[0]) is first  # slot 1 follows it
    made.leave(1)
    made.leave(2)
    assert not made.sessions and not made.parts
    assert entered(made, 3, IDS[0]) is first
    assert not made._unused


def test_the_longest_unused_goes_first(made: Constraints, monkeypatch: pytest.MonkeyPatch) -> None:
    known = [entered(made, slot, ids) for slot, ids in enumerate(IDS)]
    room = sum(session.nbytes for session in known[1:])  # type: ignore[attr-defined]
    assert room > 2 * 4 * IDS[0]
    monkeypatch.setattr(constraints, "MOST_BYTES_UNUSED", room)
    for slot in range(len(IDS)):
        made.leave(slot)
    again = [entered(made, slot, IDS[slot]) for slot in (2, 1, 0)]
    assert [one is before for one, before in zip(again, known[::-1], strict=True)] == [
        *(True, True),
        False,
    ]
    monkeypatch.setattr(constraints, "MOST_BYTES_UNUSED", 0)
    made.leave(0)
    assert not made._unused, "one alone is too large"


# ---- With one rank a process finds the parts of constraints.

WORDS = [b"", *(bytes([byte]) for byte in range(256))]


@pytest.fixture(scope="module")
def open_object() -> bytes:
    """A constraint of which canvases follow parts."""
    asked, known = Constraint.from_value("json_object", True), Vocabulary.from_tokens(WORDS, [0])
    return compile_constraint(asked, known, CompileLimits()).packed


@pytest.fixture
def alone() -> Constraints:
    kind = CanvasKind(8, len(WORDS) + 1, len(WORDS), aligned=True)
    return Constraints(SlotState(4, kind, torch.device("cpu")), alone=True)


def waiting(made: Constraints) -> list[bool]:
    found = made.starts.waits(torch.arange(4), np.arange(4))
    return [False] * 4 if found is None else found.tolist()


def answered(made: Constraints, slots: list[int]) -> None:
    while any(waiting(made)[slot] for slot in slots):
        made._begin_canvases(slots)


def test_a_canvas_waits_for_its_part_and_gets_the_same(
    alone: Constraints, made: Constraints, open_object: bytes
) -> None:
    """The first one, and the next; a request that has left leaves nothing behind."""
    for slot in (0, 1):
        alone.enter(slot, open_object, [])
    made.enter(0, open_object, [])
    assert waiting(alone) == [True, True, False, False] and not alone.parts
    alone.leave(1)
    answered(alone, [0])
    assert list(alone.parts) == [0] and not alone._finding
    alone.enter(1, open_object, [])
    assert waiting(alone) == [False] * 4, "it is known"
    slots, state = torch.tensor([0]), 7
    for one in (alone, made):
        assert not one.parts[0].whole
        one.state[0] = state
        one.starts.ask(one.state, slots, torch.tensor([True]))
        one._begin_canvases()
    assert waiting(alone)[0] and not waiting(made)[0]
    answered(alone, [0])
    assert torch.equal(alone.parts[0].automaton.numbers, made.parts[0].automaton.numbers)
    assert int(alone.state[0]) == int(made.state[0])
    output = [byte + 1 for byte in b'{"name"']
    for one in (alone, made):
        one.enter(2, open_object, output)
    answered(alone, [2])
    for one in (alone, made):
        one.enter(3, open_object, output)
        one.resume(3, output, 3)  # at once
    assert int(alone.state[3]) > 0
    for slot in (2, 3):
        assert int(alone.state[slot]) == int(made.state[slot])
        assert np.array_equal(
            alone.parts[slot].automaton.numbers, made.parts[slot].automaton.numbers
        )


def test_what_cannot_be_found_ends_its_request(alone: Constraints, open_object: bytes) -> None:
    alone.enter(0, b"\0" * 9, [])
    alone.enter(1, open_object, [])
    answered(alone, [0, 1])
    assert alone.slots.failure.tolist() == [int(Failure.NOT_TAKEN_UP), 0, 0, 0]
    assert list(alone.parts) == [1]
    alone.enter(2, b"\0" * 9, [])
    with pytest.raises(RuntimeError, match="Error"):
        alone.resume(2, [1, 2], 1)
    alone.leave(2)
    alone.enter(2, open_object, [])
    assert not waiting(alone)[2]
