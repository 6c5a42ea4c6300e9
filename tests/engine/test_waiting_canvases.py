"""Canvases of large constraints that wait for the host: which of them, and for how long."""

from __future__ import annotations

import numpy as np
import torch

from vllm_dllm.engine.constraints import CanvasStarts

SLOTS, ON_HOST = torch.tensor([0, 1]), np.array([0, 1])
STATES = torch.tensor([7, 8])
NONE = torch.tensor([False, False])
FIRST = torch.tensor([True, False])


def starts_of_two() -> CanvasStarts:
    """Two canvases whose next ones need other parts; the host answers one step late."""
    starts = CanvasStarts(2, torch.device("cpu"), late=1)
    for slot in (0, 1):
        starts.enter(slot, moves=True)
    return starts


def waiting(starts: CanvasStarts) -> list[bool]:
    found = starts.waits(SLOTS, ON_HOST)
    assert found is not None
    return found.tolist()


def test_a_canvas_waits_for_one_step_and_is_answered_once() -> None:
    starts, answered = starts_of_two(), []
    for leaves in (FIRST, NONE, NONE, NONE):
        for slot, state in starts.begun():
            starts.answer(slot)
            answered.append((slot, state))
        starts.ask(STATES, SLOTS, leaves)
        assert waiting(starts) == [not answered, False]
    assert answered == [(0, 7)]


def test_a_request_that_ends_while_it_waits_leaves_nothing_behind() -> None:
    """The next one in its slot may have no constraint, and then nothing would answer it."""
    starts = starts_of_two()
    starts.ask(STATES, SLOTS, FIRST)
    starts.leave(0)
    assert waiting(starts) == [False, False]
    starts.enter(0, moves=True)
    starts.ask(STATES, SLOTS, NONE)
    assert list(starts.begun()) == [], "a copy that is older than the request is not its own"
