"""Biases and filters: each request gets its own, in any company, and from any slot."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_dllm.engine.contracts import Batch, StepPlan
from vllm_dllm.engine.optional_parts import DEFAULTS, ROW_PARAMETERS
from vllm_dllm.engine.row_options import RowOptions, RowOptionState, RowWork
from vllm_dllm.engine.slots import CanvasKind, SlotState
from vllm_dllm.engine.token_choice import biased as changed
from vllm_dllm.ops.statistics.row_changes import MOST_SCORE
from vllm_dllm.vllm_seams.channels import Failure

L, VOCABULARY, PROMPT, SLOTS = 3, 40, 5, 6
PLAIN = RowOptions(prompt_length=PROMPT)
ASKED: dict[str, RowOptions | None] = {
    "nothing": None,
    "logprobs alone": replace(PLAIN, logprobs=3),
    "logit bias": replace(PLAIN, logit_bias={4: 3.0, 9: -100.0}),
    "allowed ids": replace(PLAIN, allowed=(1, 2, 30), logit_bias={2: 1.5, 3: 50.0}),
    "bad words": replace(PLAIN, banned=(0, 7)),
    "min_tokens": replace(PLAIN, min_tokens=5, ends=(3, 4, VOCABULARY + 7)),
    "penalties": replace(PLAIN, presence=0.7, frequency=0.31, repetition=1.3),
    "repetition": replace(PLAIN, repetition=0.6),
    "top_k": replace(PLAIN, top_k=4),
    "top_k beyond the vocabulary": replace(PLAIN, top_k=2**40),
    "top_p": replace(PLAIN, top_p=0.6),
    "min_p": replace(PLAIN, min_p=0.2),
    "no token left": replace(PLAIN, allowed=(1,), banned=(1,)),
    "everything": replace(
        PLAIN,
        **{"logit_bias": {5: 2.0}, "allowed": tuple(range(30)), "banned": (8,), "min_tokens": 9},
        **{"ends": (1,), "presence": 0.2, "frequency": 0.1, "repetition": 1.1},
        **{"top_k": 20, "top_p": 0.9, "min_p": 0.01},
    ),
}


def biased(rows: torch.Tensor, options: RowOptions, history: list[int], start: int) -> torch.Tensor:
    """The logits of one canvas, ``[L, vocabulary]``, after the biases, one after the other."""
    scores = rows.float().clone()
    if options.allowed:
        others = [i for i in range(VOCABULARY) if i not in options.allowed]
        scores[:, others] = -torch.inf
    for token, bias in options.logit_bias.items():
        scores[:, token] += bias
    for position in range(L):
        if start + position - PROMPT < options.min_tokens:
            scores[position, [end for end in options.ends if end < VOCABULARY]] = -torch.inf
    scores[:, list(options.banned)] = -torch.inf
    ruled_out = scores == -torch.inf
    before = history[: max(start, PROMPT)]
    for token in set(before):
        column, count = scores[:, token], before[PROMPT:].count(token)
        by = torch.where(column > 0, column / options.repetition, column * options.repetition)
        frequency, presence = torch.tensor([options.frequency, options.presence])
        scores[:, token] = by - (frequency * count + presence * (count > 0))
    return scores.clamp(-MOST_SCORE, MOST_SCORE).masked_fill(ruled_out, -torch.inf)


def kept(rows: torch.Tensor, options: RowOptions) -> torch.Tensor:
    """Where the filters let the tokens of one canvas pass, bool ``[L, vocabulary]``."""
    p = rows.double().softmax(-1)
    keep = p >= (options.min_p * p.amax(-1, keepdim=True))
    if options.top_k:
        p = torch.where(keep, p, 0.0)
        rank = p.argsort(-1, descending=True).argsort(-1)
        keep &= rank < options.top_k
    p = torch.where(keep, p, 0.0)
    p = p / p.sum(-1, keepdim=True)
    ordered, order = p.sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    return keep & (before < options.top_p).gather(-1, order.argsort(-1))


def state(history: torch.Tensor) -> RowOptionState:
    slots = SlotState(
        SLOTS, CanvasKind(L, VOCABULARY, VOCABULARY - 1, aligned=True), torch.device("cpu")
    )
    slots.history = history
    return RowOptionState(slots)


def put(options: RowOptionState, slot: int, asked: RowOptions | None) -> None:
    """A request that asks for this enters the slot."""
    options.leave(slot)
    if asked is not None:
        options.enter(slot, asked)


def plan_of(options: RowOptionState, slots: list[int]) -> StepPlan:
    batch = Batch(torch.tensor(slots), np.array(slots), {})
    return StepPlan(batch, options.slots, L, torch.ones(len(slots)))


@pytest.fixture(scope="module")
def history() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (SLOTS, 12), generator=seeded(1)).int()


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batches() -> list[list[str]]:
    """Each alone, all of each length of company, and random company."""
    names, rng = list(ASKED), np.random.default_rng(0)
    some = [list(rng.choice(names, rng.integers(2, SLOTS + 1))) for _ in range(60)]
    return [[name] for name in names] + [[name] * 3 for name in names] + some


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_request_gets_its_own(dtype: torch.dtype, history: torch.Tensor) -> None:
    """Bit for bit what the reference says of the request alone, in slots that others have used."""
    options, rng = state(history), np.random.default_rng(2)
    slots = options.slots
    for names in batches():
        own = rng.permutation(SLOTS)[: len(names)].tolist()
        slots.failure.fill_(0)
        for slot, name in zip(own, names, strict=True):
            put(options, slot, ASKED[name])
            slots.start[slot] = int(rng.integers(PROMPT // L, 4)) * L
        draws = 4 * torch.randn(len(own) * L, VOCABULARY, generator=seeded(len(names)))
        logits = draws.to(dtype, copy=True)
        logits[0, :4] = torch.tensor([torch.inf, -torch.inf, 0.0, -0.0])
        given = logits.clone().view(-1, L, VOCABULARY)
        plan = plan_of(options, own)
        got = changed(logits, options.changes(plan)).view(-1, L, VOCABULARY)
        assert torch.equal(logits.view_as(given), given)
        filtered = options.filtered(draws / 2, plan).view(-1, L, VOCABULARY)
        for row, (slot, name) in enumerate(zip(own, names, strict=True)):
            asked, wanted = ASKED[name] or PLAIN, given[row]
            if asked.work & RowWork.BIASES:
                start = int(slots.start[slot])
                wanted = biased(wanted, asked, history[slot].tolist(), start)
            assert torch.equal(got[row], wanted), (names, row)
            no_token = (wanted == -torch.inf).all(1).any()
            assert slots.failure[slot] == (Failure.NO_TOKEN_LEFT if no_token else Failure.NONE)
            rows = draws[row * L : (row + 1) * L] / 2
            assert torch.equal(filtered[row], rows.masked_fill(~kept(rows, asked), -torch.inf))


def test_the_filtered_logits_are_copies_where_there_are_filters(history: torch.Tensor) -> None:
    options = state(history)
    put(options, 1, ASKED["penalties"])
    put(options, 0, ASKED["top_k"])
    logits = torch.randn(2 * L, VOCABULARY, generator=seeded(1))
    before = logits.clone()
    assert not torch.equal(options.filtered(logits, plan_of(options, [0, 1])), before)
    assert torch.equal(logits, before), "the given logits are still needed"
    assert options.filtered(logits, plan_of(options, [1, 2])) is logits


def test_options_are_looked_for_in_every_parameter_that_they_are_made_from() -> None:
    """A parameter that is left out of `ROW_PARAMETERS` would be ignored silently."""
    read = set()

    class Watched:
        def __getattr__(self, name: str) -> Any:
            read.add(name)
            return getattr(DEFAULTS, name)

    assert RowOptions.from_params(Watched(), PROMPT) is None
    assert read == set(ROW_PARAMETERS)
