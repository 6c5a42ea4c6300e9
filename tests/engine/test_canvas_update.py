"""One update without an engine: what is asked of the model, and what is written back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.support.sampler import sampler_of, step
from vllm_dllm.decoding import Algorithm, Canvas, StepContext, Update, reveal
from vllm_dllm.decoding.low_confidence import LowConfidence
from vllm_dllm.engine.contracts import CommitPolicy, FollowedPaths, Readings, StepPlan
from vllm_dllm.engine.optional_parts import OptionalParts
from vllm_dllm.engine.readout_masked import MaskedReadout
from vllm_dllm.engine.slots import CanvasKind, Phase, SlotState
from vllm_dllm.engine.step import CanvasUpdate
from vllm_dllm.ops.statistics.rows import RowStatistics
from vllm_dllm.settings.resolution import ResolvedDecoding

L, VOCABULARY = 4, 50
MASK = VOCABULARY - 1
FDFO = CommitPolicy(sync=False, early=True, skip_last_commit=True, in_place=True)


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


def slots_with(*algorithms: Algorithm, temperature: float = 1.0, tokens: int = 100) -> SlotState:
    """A slot for each algorithm, with a schedule over four steps."""
    kind = CanvasKind(L, VOCABULARY, MASK, aligned=True)
    slots = SlotState(len(algorithms), kind, torch.device("cpu"))
    for slot, algorithm in enumerate(algorithms):
        choice = ResolvedDecoding(algorithm, algorithm.config(), 9, 4)
        slots.enter(slot, [1] * L, seed=slot)
        slots.configure(slot, choice, temperature, tokens)
    slots.phase.fill_(Phase.DENOISE)
    return slots


def plan_of(slots: SlotState, policy: CommitPolicy = FDFO) -> tuple[CanvasUpdate, StepPlan]:
    some = torch.arange(len(slots.phase))
    update = CanvasUpdate(slots, policy, OptionalParts(slots, "raw_logprobs"))
    return update, update.plan(update.batch(some, some.numpy()), L)


def test_a_batch_is_remembered_while_its_requests_stay_the_same() -> None:
    """vLLM writes the slots of each step to the same memory, and any request may end in between."""
    slots = slots_with(LowConfidence(), LowConfidence(), Cooling())
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
    slots = slots_with(Cooling(), LowConfidence(), Cooling(), LowConfidence())
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


@pytest.mark.parametrize("sync", [False, True])
def test_what_is_written_back(sync: bool) -> None:
    """The first canvas is finished, the second is not."""
    slots = slots_with(Cooling(), LowConfidence(), temperature=0.0)
    update, plan = plan_of(
        slots, CommitPolicy(sync, early=True, skip_last_commit=True, in_place=True)
    )
    tokens = torch.arange(2 * L).view(2, L)
    rows = Readings(RowStatistics(tokens, torch.tensor([0.5, 0.6, 0.5, 0.5]).expand(2, L)))
    outcome = update.decide(plan, plan.status, rows, None)
    decided = update.decided(plan, outcome)
    reads = update.keep(plan, plan.status, outcome)
    assert torch.equal(reads, slots.tokens)
    assert reads.tolist() == [[0, 1, 2, 3], [MASK, 5, MASK, MASK]]
    assert decided.tolist() == [[True] * L, [False, True, False, False]]
    assert slots.phase.tolist() == [Phase.DENOISE if sync else Phase.COMMIT, Phase.DENOISE]
    assert slots.ready.tolist() == [L, 0]
    assert slots.step.tolist() == [1, 1]
    assert outcome.leaves.tolist() == [False, False]
    assert outcome.goes_on().tolist() == [sync, True]

    update, plan = plan_of(slots, update.policy)
    outcome = update.decide(plan, plan.status, rows, None)
    update.keep(plan, plan.status, outcome)
    assert outcome.leaves.tolist() == [not sync, False]
    assert outcome.out.tolist() == [0 if sync else L, 0]
    assert slots.step.tolist() == [2 if sync else 0, 2]
    assert slots.start.tolist() == [L if sync else 2 * L, L]
    assert slots.remaining.tolist() == [100 if sync else 100 - L, 100]
    assert bool(slots.masked[0].all()) is not sync
    assert not update.decided(plan, outcome)[0].any(), "it was final before"


def test_a_fused_canvas_leaves_when_it_is_finished() -> None:
    """Its keys and values are still pending, unless it was read unchanged or ends its request."""
    slots = slots_with(*(LowConfidence() for _ in range(4)), temperature=0.0)
    slots.remaining[1] = L  # its last canvas
    slots.tokens[2] = torch.arange(L)  # decided before, so that this pass was its commit
    slots.masked[2] = False
    update, plan = plan_of(slots, replace(FDFO, fused=True, granted=True))
    tokens = torch.arange(L).expand(4, L)
    sure = torch.tensor([0.99, 0.99, 0.99, 0.5])[:, None].expand(4, L)
    outcome = update.decide(plan, plan.status, Readings(RowStatistics(tokens, sure)), None)
    update.keep(plan, plan.status, outcome)
    assert outcome.leaves.tolist() == [True, True, True, False]
    assert outcome.advances.tolist() == [False, True, True, False]
    assert outcome.out.tolist() == [L, L, L, 0]
    assert slots.phase.tolist() == [Phase.DENOISE] * 4
    assert slots.start.tolist() == [2 * L, 2 * L, 2 * L, L]
    assert slots.masked.all(1).tolist() == [True, True, True, False]


def test_a_mixed_batch_has_what_each_algorithm_has_alone() -> None:
    kinds = (LowConfidence(), Cooling(), LowConfidence())
    rows = Readings(RowStatistics(torch.arange(3 * L).view(3, L), torch.full((3, L), 0.5)))
    slots = slots_with(*kinds, temperature=0.0, tokens=2)
    update, plan = plan_of(slots)
    assert [batch.index.tolist() for batch in plan.batch.by_algorithm] == [[0, 2], [1]]
    outcome = update.decide(plan, plan.status, rows, None)
    assert outcome.canvas.masked.sum(1).tolist() == [3, 0, 3]
    # Only two of its tokens are wanted, and nobody reads its keys and values.
    assert outcome.leaves.tolist() == [False, True, False]
    assert outcome.out.tolist() == [0, 2, 0]
    assert np.array_equal(plan.on_host, [0, 1, 2])


def test_earlier_stages_receive_as_many_columns_as_they_expect() -> None:
    """One for each draft token and one more, or one in a step without drafts."""
    slots = slots_with(Cooling(), Cooling())
    logits = torch.eye(VOCABULARY)[: 2 * L] * 9.0
    sampler = sampler_of(
        slots, lambda parts: MaskedReadout(lambda rows: rows.clone(), slots, parts), [None, None]
    )
    sampler.has_stages = True
    output = step(sampler, logits, (0, 1))
    assert output.sampled_token_ids.shape == (2, L + 1)
    nothing = np.zeros(2, dtype=np.int64)
    prompts = SimpleNamespace(
        num_reqs=2,
        num_draft_tokens=0,
        cu_num_logits_np=np.zeros(3, dtype=np.int64),
        idx_mapping=torch.tensor([0, 1]),
        idx_mapping_np=np.arange(2),
        num_computed_prefill_tokens_np=nothing,
        num_scheduled_tokens=nothing + 3,
        prefill_len_np=nothing + L,
    )
    assert sampler(logits[:0], prompts).sampled_token_ids.shape == (2, 1)


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
