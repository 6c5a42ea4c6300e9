"""Logprobs without an engine: they are what whole rows of scores would have given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.sampler import FDFO, sampler_of, slots_of, step
from tests.support.score_rows import (
    MASK,
    MASKED,
    NAMED,
    NOISE,
    VOCABULARY,
    AtOnce,
    L,
    assert_reported,
    random_rows,
    reading,
    rows_by_index,
)
from vllm_dllm.decoding import StepContext, Update
from vllm_dllm.decoding.base import Algorithm, Canvas
from vllm_dllm.decoding.entropy_bound import EntropyBound
from vllm_dllm.engine.row_options import RowOptions
from vllm_dllm.engine.slots import SlotState
from vllm_dllm.vllm_seams.channels import Failure, PassFlags

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MODES = ["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]


ASKED: dict[str, tuple[RowOptions, Any]] = {
    "three": (RowOptions(logprobs=3), 3),
    "none beside the chosen": (RowOptions(logprobs=0), 0),
    "more than there are": (RowOptions(logprobs=90), VOCABULARY),
    "named": (RowOptions(token_ids=NAMED), NAMED),
    "biased": (RowOptions(logprobs=2, logit_bias={4: 9.0}, prompt_length=L), 2),
}
Sampled = tuple[list[Any], torch.Tensor, list[torch.Tensor]]


def masked_answers(mode: str, dtype: torch.dtype, temperature: float) -> Sampled:
    """The lists, tokens and deciding logits of each canvas in `ASKED`, which commits at once."""
    options = [asked for asked, _ in ASKED.values()]
    slots = slots_of(MASKED, [AtOnce() for _ in options], temperature)
    logits = random_rows(len(options) * L, dtype)
    sampler = sampler_of(slots, reading(slots, logits), options, mode)
    batch, hidden = range(len(options)), rows_by_index(len(logits))
    assert not step(sampler, hidden, batch).num_sampled.any()
    output = step(sampler, hidden.flip(0), batch)
    assert output.num_sampled.tolist() == [L] * len(options)
    lists = output.logprobs_tensors.tolists()
    found = [lists.slice_request(n, L) for n in batch]
    return found, output.sampled_token_ids, list(logits.view(len(options), L, -1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_reports_of_a_masked_model(mode: str, dtype: torch.dtype, temperature: float) -> None:
    found, tokens, logits = masked_answers(mode, dtype, temperature)
    for n, (name, (_, asked)) in enumerate(ASKED.items()):
        rows = logits[n].clone()
        if name == "biased" and mode.startswith("processed"):
            rows[:, 4] = (rows[:, 4].float() + 9.0).to(dtype)
        if temperature and mode.startswith("processed"):
            rows = rows.float() / temperature
            rows[:, MASK] = -torch.inf
        assert_reported(found[n], rows, tokens[n], asked, mode.endswith("logprobs"))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("read_only", [False, True])
def test_reports_of_a_model_of_noise(mode: str, temperature: float, read_only: bool) -> None:
    """At the step's temperature; greedy and read-only requests report logits as they are."""
    options = [asked for asked, _ in ASKED.values()]
    slots = slots_of(NOISE, [EntropyBound() for _ in options], temperature)
    slots.max_steps.fill_(1)
    slots.read_only.fill_(read_only)
    slots.fixed[:, 1] = True  # a pinned position keeps its token
    policy = replace(FDFO, in_place=False)
    batch, logits = range(len(options)), random_rows(len(options) * L)
    sampler = sampler_of(slots, reading(slots, logits), options, mode, policy)
    hidden = rows_by_index(len(logits))
    output = step(sampler, hidden, batch)
    if not read_only:
        assert not output.num_sampled.any()
        output = step(sampler, hidden.flip(0), batch)
    assert output.num_sampled.tolist() == [L] * len(options)
    lists = output.logprobs_tensors.tolists()
    # Of a schedule of four steps this was the first.
    divisor = 0.8 * temperature if temperature and not read_only else 1.0
    for n, (name, (_, asked)) in enumerate(ASKED.items()):
        rows = logits[n * L : (n + 1) * L].clone()
        rows[:, 4] += 9.0 * (name == "biased")
        found, tokens = lists.slice_request(n, L), output.sampled_token_ids[n]
        assert_reported(found, rows / divisor, tokens, asked, mode.endswith("logprobs"))


class Elsewhere(AtOnce):
    """Decides for a token that it was not given."""

    name = "Elsewhere"

    def choice(self, canvas: Canvas, context: StepContext) -> torch.Tensor:
        return (context.statistics.token + 1) % MASK


class Asking(Elsewhere):
    """Decides for the first token that it has asked for."""

    name = "Asking"

    def ask(self, state: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        return torch.tensor([8, 9]).expand(2, L, 2)

    def choice(self, canvas: Canvas, context: StepContext) -> torch.Tensor:
        return torch.full_like(canvas.tokens, 8)


def two_steps(algorithm: Algorithm, *asked: RowOptions | None) -> tuple[Any, SlotState]:
    slots = slots_of(MASKED, [algorithm] * len(asked))
    logits = random_rows(len(asked) * L)
    sampler = sampler_of(slots, reading(slots, logits), asked)
    hidden = rows_by_index(len(logits))
    step(sampler, hidden, range(len(asked)))
    return step(sampler, hidden, range(len(asked))), slots


def test_a_token_that_was_not_read_ends_its_request() -> None:
    """Catches logprobs of another token. Who asks for no logprobs is not affected."""
    output, slots = two_steps(Elsewhere(), RowOptions(logprobs=1), None)
    assert slots.failure.tolist() == [Failure.UNREAD_TOKEN, Failure.NONE]
    assert output.num_nans.tolist() == [
        Failure.UNREAD_TOKEN,
        -(PassFlags.COMMITTED | PassFlags.LEFT),
    ]
    assert output.num_sampled.tolist() == [0, L]


def test_a_token_that_was_asked_for_is_reported() -> None:
    output, slots = two_steps(Asking(), RowOptions(logprobs=1), RowOptions(logprobs=2))
    assert not slots.failure.any()
    assert output.sampled_token_ids.unique().tolist() == [8]
    for n, asked in enumerate((1, 2)):
        rows = random_rows(2 * L)[n * L : (n + 1) * L]
        found = output.logprobs_tensors.tolists().slice_request(n, L)
        assert_reported(found, rows, output.sampled_token_ids[n], asked, True)


class MasksAgain(AtOnce):
    """Decides all positions, and masks the first one again with a token of its own."""

    name = "MasksAgain"

    def step(self, canvas: Canvas, context: StepContext) -> Update:
        update = super().step(canvas, context)
        first = torch.arange(L) == 0
        tokens = torch.where(first, (update.canvas.tokens + 1) % MASK, update.canvas.tokens)
        return Update(
            Canvas(tokens, first.expand_as(canvas.masked), canvas.fixed), ~update.done, {}
        )


def test_a_masked_position_may_hold_any_token() -> None:
    assert not two_steps(MasksAgain(), RowOptions(logprobs=1))[1].failure.any()


def test_neighbours_that_ask_for_nothing_take_no_rows() -> None:
    """Only rows of those who ask are reported, and each finds its own."""
    asked = [None, RowOptions(logprobs=2), None, RowOptions(logprobs=1), RowOptions(top_k=2)]
    output, _ = two_steps(AtOnce(), *asked)
    assert output.logprobs_tensors.logprobs.shape == (2 * L, 3)
    lists = output.logprobs_tensors.tolists()
    for n, most in ((1, 2), (3, 1)):
        rows = random_rows(5 * L)[n * L : (n + 1) * L]
        found = lists.slice_request(n, L)
        assert_reported(found, rows, output.sampled_token_ids[n], most, True)
    assert two_steps(AtOnce(), None, RowOptions(top_k=2))[0].logprobs_tensors is None
