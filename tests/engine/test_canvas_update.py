"""One update without an engine: what is asked of the model, and what is written back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.sampler import FDFO, slots_of
from vllm_dllm.decoding import Algorithm, Canvas, StepContext, Update, get_algorithm, reveal
from vllm_dllm.decoding.thresholds import LowConfidence
from vllm_dllm.engine import step as engine_step
from vllm_dllm.engine.contracts import CommitPolicy, FollowedPaths, StepPlan
from vllm_dllm.engine.optional_parts import OptionalParts
from vllm_dllm.engine.readout_masked import MaskedReadout
from vllm_dllm.engine.slots import CanvasKind, SlotState
from vllm_dllm.engine.step import CanvasUpdate
from vllm_dllm.settings.resolution import ResolvedDecoding

L, VOCABULARY = 4, 50
MASK = VOCABULARY - 1


class Cooling(Algorithm):
    """Decides all positions at once, at a temperature that falls to 0 at the last step."""

    name = "Cooling"

    def temperature(
        self,
        temperature: torch.Tensor,
        progress: tuple[torch.Tensor, torch.Tensor],
        parameters: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        step, total = progress
        return temperature * (1 - (step + 1) / total)

    def step(self, canvas: Canvas, context: StepContext) -> Update:
        return reveal(canvas, context, canvas.masked)


KIND = CanvasKind(L, VOCABULARY, MASK, aligned=True)


def plan_of(slots: SlotState, policy: CommitPolicy = FDFO) -> tuple[CanvasUpdate, StepPlan]:
    some = torch.arange(len(slots.phase))
    update = CanvasUpdate(slots, policy, OptionalParts(slots, "raw_logprobs"))
    return update, update.plan(update.batch(some, some.numpy()), L)


def test_a_batch_is_remembered_while_its_requests_stay_the_same() -> None:
    """vLLM writes the slots of each step to the same memory, and any request may end in between."""
    slots = slots_of(KIND, [LowConfidence(), LowConfidence(), Cooling()], 1.0)
    update = CanvasUpdate(slots, FDFO, OptionalParts(slots, "raw_logprobs"))
    memory, on_host = torch.tensor([0, 1, 9], dtype=torch.int32), np.array([0, 1])
    first = update.batch(memory, on_host)
    assert update.batch(memory, on_host.copy()) is first
    memory[:2], on_host[:] = torch.tensor([2, 0]), [2, 0]
    second = update.batch(memory, on_host)
    assert first.slots.tolist() == first.on_host.tolist() == [0, 1]
    assert second.slots.tolist() == second.on_host.tolist() == [2, 0]
    assert [len(part.slots) for part in second.by_algorithm] == [1, 1]
    assert second.overridden == {"temperature"}
    slots.records[0] = True
    third = update.batch(memory, on_host)
    assert third.flags["records"] and len(third.observers) == 1
    choice = ResolvedDecoding(LowConfidence(), LowConfidence.config(), 9, 4)
    slots.configure(2, choice, 1.0, 100)  # another request enters the slot
    assert update.batch(memory, on_host).overridden == set()


def test_an_algorithm_sets_the_temperature_of_a_step() -> None:
    slots = slots_of(KIND, [Cooling(), LowConfidence(), Cooling(), LowConfidence()], 1.0)
    slots.step.copy_(torch.tensor([0, 1, 3, 3]))
    _, plan = plan_of(slots)
    assert plan.temperature.tolist() == [0.75, 1, 0, 1]
    level = torch.zeros(4 * L, VOCABULARY)
    level[:, 7] = 0.1
    parts = OptionalParts(slots, "raw_logprobs")
    readout = MaskedReadout(lambda hidden: level.clone(), slots, parts)
    found = readout.read(level, plan)
    greedy = (found.statistics.token == 7).all(1)
    assert greedy.tolist() == [False, False, True, False], "at 0 it draws nothing"


@pytest.mark.parametrize(
    ("inside", "feasible", "skips", "want"),
    [
        ([True, True, True, True], True, False, [7, 2, 7, 4]),
        ([False, True, True, True], True, False, [1, 2, 7, 4]),
        ([True, True, True, True], False, False, [1, 2, 3, 4]),
        ([True, True, True, True], True, True, [1, 2, 3, 4]),
    ],
)
def test_decided_positions_hold_the_token_of_the_path(
    inside: list[bool], feasible: bool, skips: bool, want: list[int]
) -> None:
    """The second position is masked, the last one fixed."""
    canvas = Canvas(
        torch.tensor([[1, 2, 3, 4]]),
        torch.tensor([[False, True, False, False]]),
        torch.tensor([[False, False, False, True]]),
    )
    path = torch.full((1, 4), 7)
    paths = FollowedPaths(path, torch.tensor([inside]), torch.tensor([feasible]), None)
    kept = paths.kept(canvas, torch.tensor([skips]))
    assert kept.tokens.tolist() == [want]


@pytest.mark.parametrize("temperatures", [(0.0, 0.0, 0.0), (0.7, 0.0, 1.3)])
def test_masked_positions_have_the_statistics_of_all_rows(
    temperatures: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One canvas is partly decided, one not at all, and one is finished."""
    monkeypatch.setattr(engine_step, "FEW_LOGITS", 0)
    slots = slots_of(KIND, [LowConfidence()] * 3)
    slots.temperature[:] = torch.tensor(temperatures)
    slots.samples[:] = np.array(temperatures) > 0
    slots.masked[0, ::3] = False
    slots.masked[2] = False
    logits = torch.randn(3 * L, VOCABULARY, generator=torch.Generator().manual_seed(1))
    heads: list[int] = []

    def head(rows: torch.Tensor) -> torch.Tensor:
        heads.append(len(rows))
        return rows.clone()

    plan: Any = plan_of(slots)[1]
    own = MaskedReadout(head, slots, OptionalParts(slots, "raw_logprobs"))
    found = own.read(logits, plan).statistics
    plan.masked = None
    want = own.read(logits, plan).statistics
    masked = slots.masked
    assert heads == [int(masked.sum()), 3 * L]
    assert torch.equal(found.token[masked], want.token[masked])
    assert torch.equal(found.probability[masked], want.probability[masked])
    assert found.probability.isfinite().all()


def test_whose_draws_have_a_confidence_of_their_own() -> None:
    """Those of SDAR's rules; LLaDA2's are as sure as the likeliest token."""
    names = ("LowConfidenceDynamic", "LowConfidence", "LowConfidenceStatic")
    algorithms = [get_algorithm(name, "mask")[0] for name in names]
    _, plan = plan_of(slots_of(KIND, algorithms, 0.75))
    assert plan.own_confidence.tolist() == [0.75, 0, 0.75]
    assert plan_of(slots_of(KIND, algorithms))[1].own_confidence is None
