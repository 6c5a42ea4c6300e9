"""How much of a drafted canvas a causal pass confirms, and what its slot holds afterwards."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from vllm_dllm.decoding.thresholds import LinearSpec, LowConfidence
from vllm_dllm.engine.contracts import CommitPolicy, StepPlan
from vllm_dllm.engine.optional_parts import OptionalParts
from vllm_dllm.engine.slots import CanvasKind, Phase, SlotState
from vllm_dllm.engine.step import CanvasUpdate
from vllm_dllm.engine.verifying_pass import confirmed, verified
from vllm_dllm.settings.resolution import ResolvedDecoding

L, VOCABULARY, MASK = 4, 50, 49
POLICY = CommitPolicy(sync=False, early=True, skip_last_commit=True, in_place=False)


@given(st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=2 * L, max_size=2 * L),
                          st.integers(1, L)), min_size=1, max_size=4))  # fmt: skip
def test_equals_the_loop(cases: list[tuple[list[int], int]]) -> None:
    drafted, predicted = (
        torch.tensor([numbers[part] for numbers, _ in cases])
        for part in (slice(L), slice(L, 2 * L))
    )
    width = torch.tensor([width for _, width in cases])
    wanted = []
    for canvas, row, size in zip(drafted.tolist(), predicted.tolist(), width, strict=True):
        count = 1
        while count < size and row[count - 1] == canvas[count]:
            count += 1
        wanted.append(count)
    assert confirmed(drafted, predicted, width).tolist() == wanted


def slots_of(
    *algorithms: LinearSpec | LowConfidence, tokens: int = 100
) -> tuple[SlotState, StepPlan]:
    """A slot for each algorithm, behind a prompt of six tokens, and a plan of all of them."""
    slots = SlotState(len(algorithms), CanvasKind(L, VOCABULARY, MASK, False), torch.device("cpu"))
    for slot, algorithm in enumerate(algorithms):
        slots.enter(slot, [1, 2, 3, 4, 5, 6], seed=0, reread=int(algorithm.verifies))
        choice = ResolvedDecoding(algorithm, algorithm.config(), 9, 4)
        slots.configure(slot, choice, 0.0, tokens, whole=algorithm.verifies)
    slots.phase.fill_(Phase.DENOISE)
    some = torch.arange(len(algorithms))
    update = CanvasUpdate(slots, POLICY, OptionalParts(slots, "raw_logprobs"))
    return slots, update.plan(update.batch(some, some.numpy()), L)


@pytest.mark.parametrize(
    ("sound", "tokens", "sent"), [(True, 100, 3), (False, 100, 0), (True, 2, 2)]
)
def test_what_leaves_and_what_comes_next(sound: bool, tokens: int, sent: int) -> None:
    """The rejected part of a draft is masked again, behind the token that the pass has added."""
    slots, plan = slots_of(LinearSpec(), LinearSpec(), LowConfidence(), tokens=tokens)
    slots.phase[0] = slots.phase[2] = Phase.COMMIT
    slots.tokens[:] = torch.tensor([6, 1, 2, 3])
    now = slots.read(plan.slots)
    next_canvas = torch.full((3, L), MASK)
    before = [one.clone() for one in (slots.start, slots.tail, slots.tokens, slots.remaining)]
    predicted = torch.tensor([[1, 2, 9, 5]] * 3)
    plain = SamplerOutput(
        sampled_token_ids=torch.zeros((3, L), dtype=torch.int64),
        logprobs_tensors=None,
        num_nans=torch.zeros(3, dtype=torch.int32),
        num_sampled=torch.tensor([0, 0, 4], dtype=torch.int32),
        num_rejected=torch.tensor([0, 4, 0], dtype=torch.int32),
    )
    finished, read_next = verified(
        plan, now, predicted, torch.full((3,), sound), plain, next_canvas
    )
    assert finished.sampled_token_ids[0].tolist() == [1, 2, 9, 5]
    assert finished.num_sampled.tolist() == [sent, 0, 4]
    assert finished.num_rejected.tolist() == [L - sent, 4, 0]
    count = min(3, tokens)
    last = [1, 2, 9][count - 1]
    assert read_next.tolist() == [[last, MASK, MASK, MASK], [MASK] * L, [MASK] * L]
    assert slots.start[0] == 5 + count
    assert slots.remaining[0] == tokens - count
    assert (slots.tail[0], slots.tokens[0, 0]) == (1, last)
    assert (bool(slots.fixed[0, 0]), bool(slots.masked[0, 0])) == (True, False)
    for column, old in zip(
        (slots.start, slots.tail, slots.tokens, slots.remaining), before, strict=True
    ):
        assert np.array_equal(column[1:].numpy(), old[1:].numpy())
