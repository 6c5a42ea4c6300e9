"""A CPU that computes the logits of masked positions alone, without an engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from vllm_dllm.decoding.low_confidence import LowConfidence
from vllm_dllm.engine import step
from vllm_dllm.engine.contracts import Batch, CommitPolicy, StepPlan
from vllm_dllm.engine.optional_parts import OptionalParts
from vllm_dllm.engine.readout_masked import MaskedReadout
from vllm_dllm.engine.slots import CanvasKind, Phase, SlotState
from vllm_dllm.engine.step import CanvasUpdate
from vllm_dllm.settings.resolution import ResolvedDecoding

L, VOCABULARY = 8, 40
KIND = CanvasKind(L, VOCABULARY, VOCABULARY - 1, aligned=True)
POLICY = CommitPolicy(sync=False, early=True, skip_last_commit=True, in_place=True)


@pytest.mark.parametrize("temperatures", [(0.0, 0.0, 0.0), (0.7, 0.0, 1.3)])
def test_masked_positions_have_the_statistics_of_all_rows(
    temperatures: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One canvas is partly decided, one not at all, and one is finished."""
    monkeypatch.setattr(step, "FEW_LOGITS", 0)
    slots = SlotState(3, KIND, torch.device("cpu"))
    for slot, temperature in enumerate(temperatures):
        choice = ResolvedDecoding(LowConfidence(), LowConfidence.config(), 9, 4)
        slots.enter(slot, [1] * L, seed=slot)
        slots.configure(slot, choice, temperature, 100)
    slots.phase.fill_(Phase.DENOISE)
    slots.masked[0, ::3] = False
    slots.masked[2] = False
    logits = torch.randn(3 * L, VOCABULARY, generator=torch.Generator().manual_seed(1))
    heads: list[int] = []

    def head(rows: torch.Tensor) -> torch.Tensor:
        heads.append(len(rows))
        return rows.clone()

    parts = OptionalParts(slots, "raw_logprobs")
    some = torch.arange(3)
    update = CanvasUpdate(slots, POLICY, parts)
    plan: Any = update.plan(update.batch(some, np.arange(3)), L)
    own = MaskedReadout(head, slots, parts)
    found = own.read(logits, plan).statistics
    plan.masked = None
    want = own.read(logits, plan).statistics
    masked = slots.masked
    assert heads == [int(masked.sum()), 3 * L]
    assert torch.equal(found.token[masked], want.token[masked])
    assert torch.equal(found.probability[masked], want.probability[masked])
    assert found.probability.isfinite().all()


def test_a_batch_without_masks_reads_one_row() -> None:
    nothing = torch.zeros(2, L, dtype=torch.bool)
    batch = Batch(torch.arange(2), np.arange(2), {})
    plan = StepPlan(
        batch, SlotState(2, KIND, torch.device("cpu")), L, torch.zeros(2), masked=nothing
    )
    assert plan.masked_rows().tolist() == [0]
