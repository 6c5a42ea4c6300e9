"""Rows of scores whose logprobs are known, and a sampler that reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vllm_dllm.decoding import Algorithm, StepContext, Update
from vllm_dllm.decoding.base import Canvas
from vllm_dllm.engine.contracts import Readout
from vllm_dllm.engine.optional_parts import OptionalParts
from vllm_dllm.engine.readout_masked import MaskedReadout
from vllm_dllm.engine.readout_noise import NoiseReadout
from vllm_dllm.engine.slots import CanvasKind, SlotState
from vllm_dllm.ops.statistics.head import Head

L, VOCABULARY = 4, 30
MASK = VOCABULARY - 1
MASKED = CanvasKind(L, VOCABULARY, MASK, aligned=True)
NOISE = CanvasKind(L, VOCABULARY, None, aligned=False)
NAMED = (7, 3, 28)


def random_rows(rows: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Rows with ties, also for the first place, and with tokens that are ruled out."""
    draw = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(rows, VOCABULARY, generator=draw)
    logits[:, 11] = logits[:, 12] = logits[:, :MASK].amax(1)
    logits[:, 5] = logits[:, 6]
    logits[:, 20:24] = -torch.inf
    return logits.to(dtype)


def of_definition(rows: torch.Tensor, ids: torch.Tensor, normalizes: bool) -> torch.Tensor:
    """The scores of ids ``[rows, n]``, from whole rows in float64."""
    rows = rows.double()
    return (rows.log_softmax(-1) if normalizes else rows).gather(1, ids.long())


def assert_reported(
    found: Any, rows: torch.Tensor, tokens: torch.Tensor, asked: Any, normalizes: bool
) -> None:
    """vLLM's lists ``[rows, columns]`` have the scores and ranks that whole rows give."""
    ids, scores = torch.tensor(found.logprob_token_ids), torch.tensor(found.logprobs)
    columns = 1 + (len(asked) if isinstance(asked, tuple) else asked)
    ids, scores = ids[:, :columns], scores[:, :columns]
    assert ids.shape == (len(rows), columns)
    assert ids[:, 0].tolist() == tokens.tolist()
    wanted = of_definition(rows, ids, normalizes)
    torch.testing.assert_close(scores.double(), wanted, atol=1e-5, rtol=1e-5)
    if isinstance(asked, tuple):
        assert ids[:, 1:].tolist() == [list(asked)] * len(rows)
    else:
        top = rows.double().topk(asked, -1).values
        assert torch.equal(rows.double().gather(1, ids[:, 1:].long()), top)
        assert all(len(set(row)) == asked for row in ids[:, 1:].tolist())
    ranks = (rows >= rows.gather(1, tokens[:, None])).sum(1)
    assert found.sampled_token_ranks.tolist() == ranks.tolist()


def rows_by_index(count: int) -> torch.Tensor:
    """Hidden states ``[count, 1]`` that say which rows the head of `reading` gives for them."""
    return torch.arange(count, dtype=torch.float32)[:, None]


def reading(slots: SlotState, logits: torch.Tensor) -> Callable[[OptionalParts], Readout]:
    """The readout of a head that has these logits, see `rows_by_index`."""

    def rows(hidden: torch.Tensor) -> torch.Tensor:
        return logits[hidden[:, 0].long()].clone()

    if slots.kind.mask_token is not None:
        return lambda parts: MaskedReadout(rows, slots, parts)
    head = Head(
        lambda hidden, first, end: rows(hidden)[:, first:end].float(),
        VOCABULARY,
        embedding=torch.eye(VOCABULARY),
    )
    return lambda parts: NoiseReadout(head, slots, parts)


class AtOnce(Algorithm):
    """Decides all positions in one step."""

    name = "AtOnce"

    def step(self, canvas: Canvas, context: StepContext) -> Update:
        tokens = torch.where(canvas.masked, self.choice(canvas, context), canvas.tokens)
        done = torch.ones_like(context.last)
        return Update(Canvas(tokens, torch.zeros_like(canvas.masked), canvas.fixed), done)

    def choice(self, canvas: Canvas, context: StepContext) -> torch.Tensor:
        return context.statistics.token
