"""Slots: what a request finds when it arrives, and what the one before it left."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch

from vllm_dllm.engine.slots import (
    CHANGING,
    MAX_END_TOKENS,
    CanvasKind,
    Phase,
    SlotState,
    SlotStatus,
)
from vllm_dllm.settings.resolution import ResolvedDecoding, Served
from vllm_dllm.settings.server import DllmSettings

MASK, L = 99, 8


def masked_slots() -> SlotState:
    kind = CanvasKind(L, vocabulary=100, mask_token=MASK, aligned=True)
    return SlotState(3, kind, torch.device("cpu"))


def noisy_slots() -> SlotState:
    kind = CanvasKind(L, vocabulary=100, mask_token=None, aligned=False)
    return SlotState(3, kind, torch.device("cpu"))


def choice(slots: SlotState, **settings: float) -> ResolvedDecoding:
    corruption = "mask" if slots.kind.mask_token is not None else "uniform"
    own = "JointThreshold" if corruption == "mask" else "EntropyBound"
    return Served(corruption, own, DllmSettings(parameters=settings), length=L).choose()


def test_literal_mask_in_the_tail_is_the_users() -> None:
    slots = masked_slots()
    slots.enter(0, [1] * L + [5, MASK], seed=0)
    assert slots.fixed[0, 1]
    assert not slots.masked[0, 1]


@pytest.mark.parametrize("make", [masked_slots, noisy_slots])
def test_a_reused_slot_carries_nothing_over(make: Callable[[], SlotState]) -> None:
    used, fresh = make(), make()
    used.enter(2, [1, 2, 3], seed=5)
    used.configure(2, choice(used), 0.7, 9, [4, 5], read_only=True)
    used.seed_canvas(2, range(L), pinned=[1, 3])
    (bank,) = used.algorithms.by_name.values()
    for tensor in (used.step, used.ready, *bank.state.values()):
        tensor[2] = 5
    used.phase[2] = Phase.COMMIT
    for state in (used, fresh):
        state.enter(2, [8], seed=9)
        state.configure(2, choice(state), 0.0, 4, [6])
    (new,) = fresh.algorithms.by_name.values()
    for got, want in ((used, fresh), (bank, new)):
        for name, tensor in vars(want).items():
            if isinstance(tensor, torch.Tensor):
                assert torch.equal(vars(got)[name], tensor), name
    for name, tensor in state_of(used, torch.tensor([2])).items():
        assert (tensor == bank.algorithm.state[name].initial).all(), name
    assert not used.samples[2]


def state_of(slots: SlotState, some: torch.Tensor) -> Mapping[str, torch.Tensor]:
    """What the algorithm of these slots keeps."""
    (batch,) = slots.algorithms.batches(some, some.numpy())
    return batch.state(slots.step[some])


def advanced(
    slots: SlotState, some: torch.Tensor, now: SlotStatus, leaves: torch.Tensor
) -> torch.Tensor:
    """What slots read next after a step that has changed nothing but which canvases leave."""
    same = {name: getattr(now, name) for name in CHANGING if name != "start"}
    return slots.advance(some, now, now.canvas, leaves, L, **same)


def test_a_fresh_canvas_comes_from_seed_and_position_alone() -> None:
    """Whatever slot a request gets, and whether it was preempted before the canvas."""
    slots = noisy_slots()
    slots.enter(0, [1] * 5, seed=7)
    slots.enter(1, [1] * 5, seed=8)
    slots.enter(2, [1] * (5 + L), seed=7)
    assert slots.start.tolist() == [5, 5, 5 + L]
    assert not torch.equal(slots.tokens[0], slots.tokens[1])
    first = slots.tokens[0].clone()
    some = torch.tensor([0, 1])
    reads = advanced(slots, some, slots.read(some), torch.tensor([True, False]))
    assert torch.equal(reads, slots.tokens[:2])
    assert torch.equal(slots.tokens[0], slots.tokens[2])
    assert not torch.equal(slots.tokens[0], first)
    assert slots.start.tolist() == [5 + L, 5, 5 + L]


def test_surplus_end_tokens_only_lose_the_short_cut() -> None:
    slots = masked_slots()
    slots.configure(0, choice(slots), 0.0, 9, range(MAX_END_TOKENS + 4))
    assert slots.end_tokens[0].tolist() == list(range(MAX_END_TOKENS))
