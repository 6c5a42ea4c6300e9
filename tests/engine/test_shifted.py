"""Canvases whose positions are read at the row before, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.sampler import step
from vllm_dllm.decoding.joint_threshold import JointThreshold
from vllm_dllm.decoding.sub_blocks import SubBlocks
from vllm_dllm.engine import step as engine_step
from vllm_dllm.engine.contracts import CommitPolicy
from vllm_dllm.engine.optional_parts import OptionalParts
from vllm_dllm.engine.readout_shifted import ShiftedReadout
from vllm_dllm.engine.sampler import DiffusionSampler
from vllm_dllm.engine.slots import CanvasKind, Phase, SlotState
from vllm_dllm.settings.resolution import ResolvedDecoding

L, VOCABULARY, MASK = 8, 40, 39
KIND = CanvasKind(L, VOCABULARY, MASK, aligned=True, shifted=True)
POLICY = CommitPolicy(sync=False, early=True, skip_last_commit=True, in_place=True)


def canvases(prompts: list[int], temperature: float = 0.0, rule: Any = None) -> DiffusionSampler:
    """A sampler whose hidden states are logits; a slot for each length of a prompt."""
    slots = SlotState(len(prompts), KIND, torch.device("cpu"))
    algorithm = rule or SubBlocks()
    choice = ResolvedDecoding(algorithm, algorithm.config(threshold=0.0), 9, 4)
    for slot, length in enumerate(prompts):
        slots.enter(slot, list(range(length)), seed=slot)
        slots.configure(slot, choice, temperature, 20)
        slots.phase[slot] = slots.after_prefill[slot]
    parts = OptionalParts(slots, "raw_logprobs")
    history = torch.zeros((len(prompts), 64), dtype=torch.int32)
    states = SimpleNamespace(
        all_token_ids=SimpleNamespace(gpu=history), draft_tokens=slots.tokens.clone()
    )
    readout = ShiftedReadout(lambda rows: rows.clone(), slots, parts)
    return DiffusionSampler(states, slots, POLICY, readout, parts)


def predicting(first: int) -> torch.Tensor:
    """Logits of a canvas whose rows predict `first`, `first` + 1 and so on."""
    return torch.nn.functional.one_hot(first + torch.arange(L), VOCABULARY) * 9.0


@pytest.mark.parametrize("prompt", [1, L - 1, L, L + 1, 3 * L])
def test_where_the_first_canvas_begins(prompt: int) -> None:
    slots = canvases([prompt]).slots
    tail = (prompt - 1) % L + 1
    again = tail == L
    assert slots.start[0] == prompt - tail
    assert slots.tail[0] == tail
    assert slots.tokens[0].tolist() == [*range(prompt - tail, prompt)] + [MASK] * (L - tail)
    assert slots.masked[0].tolist() == [False] * tail + [True] * (L - tail)
    assert slots.fixed[0].tolist() == [True] * tail + [False] * (L - tail)
    assert slots.phase[0] == (Phase.COMMIT if again else Phase.DENOISE)
    assert slots.ready[0] == (L if again else 0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("few_logits", [0, engine_step.FEW_LOGITS], ids=["some rows", "all rows"])
def test_a_position_is_read_at_the_row_before(
    temperature: float, few_logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a prompt without a tail, whose last block predicts the first token of the answer."""
    monkeypatch.setattr(engine_step, "FEW_LOGITS", few_logits)
    sampler = canvases([L + 3, L], temperature)
    slots = sampler.slots
    rows = torch.cat([predicting(10), predicting(20)])
    rows[L + 7, 27] = 1e-3  # hardly the likeliest
    out = step(sampler, rows, [0, 1])
    # Position 3 is read at row 2 of the logits, and so on.
    if temperature == 0:
        assert slots.tokens[0].tolist() == [8, 9, 10, 12, 13, 14, 15, 16]
    assert slots.phase.tolist() == [Phase.COMMIT, Phase.DENOISE]
    assert out.num_sampled.tolist() == [0, 0]
    assert out.num_rejected.tolist() == [L, 0]
    assert slots.start.tolist() == [L, L]
    assert slots.tokens[1].tolist() == [27] + [MASK] * (L - 1)
    assert slots.masked[1].tolist() == [False] + [True] * (L - 1)
    assert not slots.fixed[1].any()
    assert slots.tail[1] == 0
    assert slots.remaining[1] == 20


def test_the_last_row_of_a_commit_predicts_the_next_canvas() -> None:
    """And not that of a step that has still changed the canvas."""
    sampler = canvases([3])
    step(sampler, predicting(10), [0])
    assert sampler.slots.phase[0] == Phase.COMMIT
    out = step(sampler, predicting(30), [0])
    assert out.sampled_token_ids[0, :5].tolist() == [12, 13, 14, 15, 16]
    assert out.num_sampled.tolist() == [5]
    assert sampler.slots.tokens[0].tolist() == [37] + [MASK] * (L - 1)


def test_a_rule_that_edits_keeps_the_boundary_token() -> None:
    sampler = canvases([L], rule=JointThreshold())
    slots = sampler.slots
    step(sampler, predicting(20), [0])
    for _ in range(3):
        step(sampler, predicting(2), [0])
        if slots.start[0] == 2 * L:
            break
        assert slots.tokens[0].tolist() == [27, *range(2, 2 + L - 1)]
    assert slots.start[0] == 2 * L, "unchanged, so that the pass was a commit"
    assert slots.tokens[0, 0] == 2 + L - 1


def test_the_rows_that_a_cpu_reads() -> None:
    sampler = canvases([L + 3, L])
    update = sampler.canvas_update
    plan = update.plan(update.batch(torch.arange(2), np.arange(2)), L)
    plan.masked = sampler.slots.masked.clone()
    read: list[int] = []
    sampler.readout.head = lambda rows: (read.append(len(rows)), rows.clone())[1]
    sampler.readout.read(torch.cat([predicting(1), predicting(1)]), plan)
    assert read == [5 + 1]
