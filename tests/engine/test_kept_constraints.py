"""A constraint outlives its requests: the next one with the same need not unpack or explore it."""

from __future__ import annotations

import pytest
import torch

from vllm_dllm.engine import constraints
from vllm_dllm.engine.constraints import Constraints
from vllm_dllm.engine.slots import CanvasKind, SlotState
from vllm_dllm.selftest.steps import automaton

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
