"""Bias, filter, draw, report without an engine: what a request's logprobs are taken of."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from vllm_dllm.decoding.low_confidence import LowConfidence
from vllm_dllm.engine.contracts import CommitPolicy
from vllm_dllm.engine.logprobs import LogprobReports
from vllm_dllm.engine.optional_parts import OptionalParts
from vllm_dllm.engine.readout_masked import MaskedReadout
from vllm_dllm.engine.row_options import RowOptions, RowOptionState
from vllm_dllm.engine.slots import CanvasKind, Phase, SlotState
from vllm_dllm.engine.step import CanvasUpdate
from vllm_dllm.settings.resolution import ResolvedDecoding

L, VOCABULARY = 3, 20
MASK = VOCABULARY - 1
LOGITS = torch.randn(2 * L, VOCABULARY, generator=torch.Generator().manual_seed(3))
ASKED = RowOptions(top_k=2, logit_bias={4: 3.0}, logprobs=2, prompt_length=L)


class RecordedReports(LogprobReports):
    """Keeps the whole rows that logprobs would be computed from, by slot."""

    def __init__(self, slots: SlotState, rows: RowOptionState, mode: str) -> None:
        super().__init__(slots, rows, mode)
        self.seen: dict[int, torch.Tensor] = {}

    def capture(
        self,
        on_host: np.ndarray,
        scores_of: Callable[[int, slice], torch.Tensor],
        candidates: torch.Tensor,
    ) -> None:
        for index, slot, _ in self.asking(on_host):
            self.seen[slot] = scores_of(index, slice(0, L))


def scores(mode: str, temperatures: tuple[float, float]) -> torch.Tensor:
    """What the first request's logprobs are taken of; the second asks for nothing."""
    kind = CanvasKind(L, VOCABULARY, MASK, aligned=True)
    slots = SlotState(2, kind, torch.device("cpu"))
    for slot, temperature in enumerate(temperatures):
        choice = ResolvedDecoding(LowConfidence(), LowConfidence.config(), 9, 4)
        slots.enter(slot, [1] * L, seed=slot)
        slots.configure(slot, choice, temperature, 100)
    slots.phase.fill_(Phase.DENOISE)
    parts = OptionalParts(slots, mode)
    parts.rows.enter(0, ASKED)
    parts.logprobs = reports = RecordedReports(slots, parts.rows, mode)
    readout = MaskedReadout(lambda hidden: hidden.clone(), slots, parts)
    policy = CommitPolicy(sync=False, early=True, skip_last_commit=True, in_place=True)
    update = CanvasUpdate(slots, policy, parts)
    plan = update.plan(update.batch(torch.arange(2), np.arange(2)), L)
    readout.read(LOGITS, plan)
    assert list(reports.seen) == [0], "only requests that ask"
    return reports.seen[0]


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("own", [0.0, 0.7])
def test_a_neighbour_that_draws_changes_no_score(mode: str, own: float) -> None:
    """Catches greedy requests whose filters took effect only beside one that draws."""
    assert torch.equal(scores(mode, (own, 0.0)), scores(mode, (own, 1.0)))


def test_raw_scores_are_the_models() -> None:
    assert torch.equal(scores("raw_logprobs", (0.7, 0.0)), LOGITS[:L])


def test_processed_scores_are_what_was_chosen_from() -> None:
    """Biased for a greedy request; for one that draws also tempered and filtered."""
    biased = LOGITS[:L].clone()
    biased[:, 4] += 3.0
    assert torch.equal(scores("processed_logprobs", (0.0, 0.0)), biased)
    drawn = scores("processed_logprobs", (0.5, 0.0))
    assert (drawn.isfinite().sum(-1) == 2).all(), "top-k leaves two"
    assert (drawn[:, MASK] == -torch.inf).all()
    kept = drawn.isfinite()
    torch.testing.assert_close(drawn[kept], (biased / 0.5)[kept])
