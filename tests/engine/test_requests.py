"""Slots: what a request finds when it arrives, and what the one before it left."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from vllm_dllm.engine.requests import MAX_END_TOKENS, Phase, SlotState

MASK, L = 99, 8


@pytest.fixture
def slots() -> SlotState:
    return SlotState(3, L, MASK, ("threshold",), torch.device("cpu"))


@pytest.mark.parametrize("prompt", [1, L - 1, L, L + 1, 3 * L])
def test_tail_is_the_start_of_the_first_canvas(slots: SlotState, prompt: int) -> None:
    tail = prompt % L
    slots.start(1, list(range(prompt)))
    assert slots.tokens[1].tolist() == [*range(prompt - tail, prompt)] + [MASK] * (L - tail)
    assert slots.fixed[1].tolist() == [True] * tail + [False] * (L - tail)
    assert slots.masked[1].tolist() == [False] * tail + [True] * (L - tail)
    assert slots.tail[1] == tail
    assert slots.phase[1] == Phase.PREFILL


def test_literal_mask_in_the_tail_is_the_users(slots: SlotState) -> None:
    slots.start(0, [1] * L + [5, MASK])
    assert slots.fixed[0, 1]
    assert not slots.masked[0, 1]


def test_a_reused_slot_carries_nothing_over(slots: SlotState) -> None:
    fresh = SlotState(3, L, MASK, ("threshold",), torch.device("cpu"))
    for state in (slots, fresh):
        if state is slots:
            state.start(2, [1, 2, 3])
            state.configure(2, 3, [4, 5], {"threshold": 0.1})
            for tensor in (state.step, state.ready):
                tensor[2] = 5
            state.phase[2] = Phase.COMMIT
        state.start(2, [8])
        state.configure(2, 9, [6], {"threshold": 0.5})
    for name, tensor in vars(fresh).items():
        if isinstance(tensor, torch.Tensor):
            assert torch.equal(vars(slots)[name], tensor), name
    assert slots.parameters["threshold"][2] == fresh.parameters["threshold"][2]


def test_surplus_end_tokens_only_lose_the_short_cut(slots: SlotState) -> None:
    slots.configure(0, 1, range(MAX_END_TOKENS + 4), {"threshold": 1})
    assert slots.end_tokens[0].tolist() == list(range(MAX_END_TOKENS))


def test_canvas_and_store_are_inverse(slots: SlotState) -> None:
    order = torch.tensor([2, 0])
    slots.start(0, [1, 2])
    slots.start(2, [3])
    canvas = slots.canvas(order)
    slots.start(0, [7])
    slots.start(2, [7])
    slots.store(order, canvas)
    assert slots.tokens[0, :2].tolist() == [1, 2]
    assert slots.tokens[2, :1].tolist() == [3]


def test_slots_need_no_vllm() -> None:
    code = "import sys, vllm_dllm.engine.requests; print('vllm' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"
