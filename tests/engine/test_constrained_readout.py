"""Readouts of batches in which some canvases follow a constraint, without an engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from canvas_grammar import CompileLimits, Constraint, Vocabulary
from canvas_grammar.automaton.compilation import compile_constraint
from canvas_grammar_support.joined import interpreted_finder

from vllm_dllm.decoding.base import DrawConfidence
from vllm_dllm.decoding.entropy_bound import EntropyBound
from vllm_dllm.decoding.thresholds import LowConfidence
from vllm_dllm.engine import constraints
from vllm_dllm.engine.constraints import CanvasStarts
from vllm_dllm.engine.contracts import CommitPolicy, Readings, StepPlan
from vllm_dllm.engine.optional_parts import OptionalParts
from vllm_dllm.engine.readout_masked import MaskedReadout
from vllm_dllm.engine.readout_noise import NoiseReadout
from vllm_dllm.engine.row_options import RowOptions
from vllm_dllm.engine.slots import CanvasKind, Phase, SlotState
from vllm_dllm.engine.step import CanvasUpdate
from vllm_dllm.ops.statistics.head import Head
from vllm_dllm.settings.resolution import ResolvedDecoding

L, WORDS = 6, [b"", *(bytes([byte]) for byte in b"abcdefghijklmnopqrstuvwxyz123")]
VOCABULARY = len(WORDS) + 1  # with a mask
# Of each request: its temperature, its constraint, and its options of whole rows.
BIASED = RowOptions(logit_bias={4: 3.0}, prompt_length=L)
REQUESTS = [
    (0.8, "[a-f]{2,3}[12]", None),
    (0.7, None, None),
    (0.0, "(ab|c)*", None),
    (0.9, "[a-z]*3?", None),
    (0.6, "[a-f]{2,3}[12]", BIASED),
]


def packed(pattern: str) -> bytes:
    known = Vocabulary.from_tokens([*WORDS, b""], [0])
    return compile_constraint(
        Constraint.from_value("regex", pattern), known, CompileLimits()
    ).packed


class Batch:
    """Requests in the first denoise step of their first canvas, and their readings."""

    def __init__(self, masked: bool, finder: str = "cpu", **more: Any) -> None:
        mask = VOCABULARY - 1 if masked else None
        kind = CanvasKind(L, VOCABULARY, mask, aligned=masked, **more)
        count, algorithm = len(REQUESTS), LowConfidence if masked else EntropyBound
        self.slots = SlotState(count, kind, torch.device("cpu"))
        self.parts = OptionalParts(self.slots, "raw_logprobs")
        if finder == "triton":
            self.parts.constraints.finder = interpreted_finder()
        for slot, (temperature, pattern, options) in enumerate(REQUESTS):
            self.slots.enter(slot, [1] * L, seed=slot)
            choice = ResolvedDecoding(algorithm(), algorithm.config(), 9, 4)
            self.slots.configure(slot, choice, temperature, 100)
            if pattern is not None:
                self.parts.constraints.enter(slot, packed(pattern), [])
            if options is not None:
                self.parts.rows.enter(slot, options)
        self.slots.phase.fill_(Phase.DENOISE)
        generator = torch.Generator().manual_seed(3)
        self.logits = 3 * torch.randn(count * L, VOCABULARY, generator=generator)
        self.whole: list[int] = []

    def plan(self) -> StepPlan:
        policy = CommitPolicy(sync=False, early=True, skip_last_commit=True, in_place=True)
        count = len(REQUESTS)
        update = CanvasUpdate(self.slots, policy, self.parts)
        return update.plan(update.batch(torch.arange(count), np.arange(count)), L)

    def head(self) -> Head:
        def rows(hidden: torch.Tensor) -> torch.Tensor:
            self.whole.append(len(hidden) // L)
            return self.logits[hidden[:, 0].long()].clone()

        return Head(rows, VOCABULARY, embedding=torch.eye(VOCABULARY))

    def readings(self, plan: StepPlan) -> Readings:
        hidden = torch.arange(len(self.logits), dtype=torch.float32)[:, None]
        if self.slots.kind.mask_token is None:
            return NoiseReadout(self.head(), self.slots, self.parts).read(hidden, plan)
        readout = MaskedReadout(lambda rows: self.logits.clone(), self.slots, self.parts)
        return readout.read(hidden, plan)


@pytest.mark.slow
@pytest.mark.parametrize("masked", [True, False])
def test_the_kernels_find_what_a_cpu_finds(masked: bool) -> None:
    """Best and drawn paths, with and without options of whole rows, in one batch."""
    found = []
    for finder in ("cpu", "triton"):
        batch = Batch(masked, finder)
        plan = batch.plan()
        readings = batch.readings(plan)
        assert plan.constraint is not None
        found.append((readings.statistics, plan.constraint.path))
    for one, two in zip(*found, strict=True):
        for name, tensor in vars(one).items():
            torch.testing.assert_close(tensor, getattr(two, name), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("draw_confidence", ["tempered", "filtered"])
def test_a_confidence_at_the_temperature_of_draws(draw_confidence: DrawConfidence) -> None:
    """Drawn freely or along a path, before or after the request's filters."""
    batch = Batch(masked=True, draw_confidence=draw_confidence)
    batch.parts.rows.enter(1, RowOptions(top_k=5, prompt_length=L))
    plan = batch.plan()
    found = batch.readings(plan).statistics
    assert plan.constraint is not None
    path, logits = plan.constraint.path, batch.logits.unflatten(0, (-1, L)).clone()
    logits[..., VOCABULARY - 1] = -torch.inf
    for slot, (temperature, pattern, _) in enumerate(REQUESTS[:4]):
        scores = logits[slot] / (temperature or 1.0)
        if slot == 1 and draw_confidence == "filtered":
            scores[scores < scores.topk(5).values[:, -1:]] = -torch.inf
        own = scores.softmax(-1).gather(1, found.token[slot][:, None])[:, 0]
        if temperature:
            inside = path.inside[slot] if pattern else torch.ones(L, dtype=torch.bool)
            assert inside.any()
            torch.testing.assert_close(found.probability[slot][inside], own[inside])


def test_paths_change_tokens_alone() -> None:
    """The tokens are those of paths, with the probabilities that whole rows give them."""
    batch = Batch(masked=False)
    plan = batch.plan()
    found = batch.readings(plan)
    assert batch.whole == [5], "the head is multiplied once"
    plain = batch.plan()
    plain.constraint = None
    free, got = batch.readings(plain), found.statistics
    assert plan.constraint is not None and found.soft_embedding is not None
    path = plan.constraint.path
    for index, (temperature, pattern, options) in enumerate(REQUESTS):
        logits = batch.logits[index * L : (index + 1) * L].double()
        if options is not None:
            logits[:, 4] += 3
        sure = (logits / (float(plan.temperature[index]) or 1)).softmax(-1)
        if temperature == 0:
            sure = torch.nn.functional.one_hot(logits.argmax(-1), VOCABULARY).double()
        for token, probability in (
            (got.token[index], got.probability[index]),
            (got.sample[index], got.sample_probability[index]),
        ):
            expected = sure.gather(1, token[:, None])[:, 0].float()
            # A difference of logits below 32 is off by 2^-19, and so is its exponential.
            torch.testing.assert_close(probability, expected, rtol=1e-5, atol=1e-7)
        if pattern is None:
            for name, tensor in vars(free.statistics).items():
                assert torch.equal(getattr(got, name)[index], tensor[index])
        else:
            assert path.feasible[index]
            kept = ~path.after_end[index]
            assert torch.equal(got.token[index][kept], path.token[index][kept])
            assert torch.equal(got.token[index][~kept], free.statistics.token[index][~kept])
            assert temperature > 0 or torch.equal(got.sample[index], got.token[index])
        if options is None:
            assert torch.equal(found.soft_embedding[index], free.soft_embedding[index])


def test_a_plan_is_made_once_for_a_set_of_canvases(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(masked=True)
    plans = []
    make = batch.parts.constraints.finder.plan
    monkeypatch.setattr(
        batch.parts.constraints.finder, "plan", lambda canvases: plans.append(1) or make(canvases)
    )
    for _ in range(3):
        batch.readings(batch.plan())
    assert len(plans) == 1


# ---- Canvases of large constraints, which wait for the host


def test_which_canvases_wait_for_the_host_and_what_is_left_of_who_has_ended() -> None:
    """The next request in a slot may have no constraint, and then nothing would answer it."""
    starts = CanvasStarts(2, torch.device("cpu"), late=1)
    slots, states = torch.tensor([0, 1]), torch.tensor([7, 8])

    def waiting() -> list[bool]:
        found = starts.waits(slots, np.array([0, 1]))
        assert found is not None
        return found.tolist()

    for slot in (0, 1):
        starts.enter(slot, moves=True)
    starts.ask(states, slots, torch.tensor([True, False]))
    assert list(starts.begun()) == [] and waiting() == [True, False]
    starts.leave(0)
    assert waiting() == [False, False]
    starts.ask(states, slots, torch.tensor([True, False]))
    assert list(starts.begun()) == [] and waiting() == [False, False]
    starts.enter(0, moves=True)
    starts.ask(states, slots, torch.tensor([False, False]))
    assert list(starts.begun()) == [], "a copy that is older than the request is not its own"


@pytest.mark.slow
@pytest.mark.parametrize("most", [1 << 30, 20_000, 1])
def test_paths_take_a_bounded_amount_of_memory(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Canvases are followed in parts of so many bytes, or one at a time, to the same tokens."""
    monkeypatch.setattr(constraints, "MOST_BYTES_AT_ONCE", most)
    whole, batch = Batch(False), Batch(False, "triton")
    expected = whole.readings(whole.plan()).statistics
    finder, planned = batch.parts.constraints.finder, []
    make = finder.plan
    monkeypatch.setattr(finder, "plan", lambda some: planned.append(make(some)) or planned[-1])
    found = batch.readings(batch.plan()).statistics
    for name, tensor in vars(expected).items():
        torch.testing.assert_close(getattr(found, name), tensor, rtol=1e-5, atol=1e-6)
    sizes = [finder.nbytes(plan, L) for plan in planned]
    taken = sum(part.nbytes for part in finder.scratch.parts.values())
    used = sizes if sizes[0] <= most else sizes[1:]  # the first plan is that of all
    assert taken == max(used) and (taken <= most or most == 1)
