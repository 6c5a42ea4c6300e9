"""Canvases whose positions are read at the row before, without an engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.sampler import sampler_of, step
from vllm_dllm.decoding.joint_threshold import JointThreshold
from vllm_dllm.decoding.sub_blocks import SubBlocks
from vllm_dllm.engine import step as engine_step
from vllm_dllm.engine.readout_shifted import ShiftedReadout
from vllm_dllm.engine.sampler import DiffusionSampler
from vllm_dllm.engine.slots import CanvasKind, Phase, SlotState
from vllm_dllm.settings.resolution import ResolvedDecoding

L, VOCABULARY, MASK = 8, 40, 39
KIND = CanvasKind(L, VOCABULARY, MASK, aligned=True, shifted=True)


def canvases(
    prompts: list[int], temperature: float = 0.0, rule: Any = None, kind: CanvasKind = KIND
) -> DiffusionSampler:
    """A sampler whose hidden states are logits; a slot for each length of a prompt."""
    slots = SlotState(len(prompts), kind, torch.device("cpu"))
    algorithm = rule or SubBlocks()
    choice = ResolvedDecoding(algorithm, algorithm.config(threshold=0.0), 9, 4)
    for slot, length in enumerate(prompts):
        slots.enter(slot, list(range(length)), seed=slot)
        slots.configure(slot, choice, temperature, 20)
        slots.phase[slot] = slots.after_prefill[slot]
    return sampler_of(
        slots, lambda parts: ShiftedReadout(lambda rows: rows.clone(), slots, parts), []
    )


def predicting(first: int) -> torch.Tensor:
    """Logits of a canvas whose rows predict `first`, `first` + 1 and so on."""
    return torch.nn.functional.one_hot(first + torch.arange(L), VOCABULARY) * 9.0


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
    read: list[int] = []
    sampler.readout.head = lambda hidden: (read.append(len(hidden)), hidden.clone())[1]
    out = step(sampler, rows, [0, 1])
    assert read == [2 * L if few_logits else 5 + 1]
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


@pytest.mark.parametrize("few_logits", [0, engine_step.FEW_LOGITS], ids=["some rows", "all rows"])
def test_the_last_token_of_a_prompt_predicts_the_next_one(
    few_logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where canvases begin after it: it alone stays of its pass, however wide the canvas is."""
    monkeypatch.setattr(engine_step, "FEW_LOGITS", few_logits)
    sampler = canvases([5, L, 1], kind=replace(KIND, aligned=False))
    slots = sampler.slots
    assert slots.start.tolist() == [4, L - 1, 0]
    assert slots.tokens[:, 0].tolist() == [4, L - 1, 0]
    assert slots.tail.tolist() == [1, 1, 1]
    assert slots.phase.tolist() == [Phase.COMMIT] * 3
    out = step(sampler, torch.cat([predicting(10), predicting(20), predicting(30)]), [0, 1, 2])
    assert out.num_sampled.tolist() == [0, 0, 0]
    assert out.num_rejected.tolist() == [L - 1] * 3
    assert slots.start.tolist() == [5, L, 1]
    assert slots.tokens.tolist() == [[first] + [MASK] * (L - 1) for first in (10, 20, 30)]
    assert slots.masked.tolist() == [[False] + [True] * (L - 1)] * 3
    assert not slots.fixed.any()
    # Then as of any shifted model; the commit predicts the next first token.
    out = step(sampler, torch.cat([predicting(10), predicting(20), predicting(30)]), [0, 1, 2])
    assert slots.tokens[0].tolist() == [10, *range(10, 10 + L - 1)]
    assert out.num_rejected.tolist() == [L] * 3
    out = step(sampler, torch.cat([predicting(n) for n in (2, 12, 22)]), [0, 1, 2])
    assert out.num_sampled.tolist() == [L] * 3
    assert out.num_rejected.tolist() == [0] * 3
    assert slots.tokens[:, 0].tolist() == [2 + L - 1, 12 + L - 1, 22 + L - 1]
    assert slots.start.tolist() == [5 + L, 2 * L, 1 + L]
