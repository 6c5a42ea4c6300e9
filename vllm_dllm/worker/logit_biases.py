"""Biases and filters: what a request's parameters do to whole rows of logits.

The order of biases is vLLM's: allowed ids, bias, minimum length, bans, penalties. Penalties count
what stands before the canvas, so a canvas' positions do not depend on the order in which they are
decided.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from vllm_dllm.worker.row_options import RowOptions
from vllm_dllm.worker.slots import Mark, SlotState

# The largest score, by the dtype of logits: one that a temperature, at least 0.01, leaves finite.
MOST_SCORE = {torch.float32: 1e30, torch.bfloat16: 1e30, torch.float16: 6e4}


class LogitBiases:
    """Changes the logits of requests that ask for it; one loop over those requests."""

    def __init__(self, slots: SlotState, vocabulary: int) -> None:
        self.slots = slots
        self.vocabulary = vocabulary

    def apply(self, logits: torch.Tensor, on_host: np.ndarray) -> None:
        """Apply the biases of a batch to its logits ``[n * L, vocabulary]``, in place."""
        length = self.slots.length
        for index, slot, options in self.slots.with_row_options(on_host):
            if options.biases:
                self._apply(logits[index * length : (index + 1) * length], slot, options)

    def _apply(self, rows: torch.Tensor, slot: int, options: RowOptions) -> None:
        """Bias one canvas' ``[L, vocabulary]``.

        Whatever numbers meet here, scores stay finite or become -inf, which rules a token out.
        """

        def ids(values: Sequence[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64, device=rows.device)

        scores = rows.float()
        if options.allowed:
            allowed = ids(options.allowed)
            scores = torch.full_like(scores, -torch.inf).index_copy_(1, allowed, scores[:, allowed])
        if options.logit_bias:
            bias = torch.tensor(list(options.logit_bias.values()), device=rows.device)
            scores = scores.index_add(1, ids(list(options.logit_bias)), bias.expand(len(rows), -1))
        if options.min_tokens and options.ends:
            put_out = self.slots.start[slot] + self.slots.position - options.prompt_length  # [L]
            too_early = (put_out < options.min_tokens)[:, None]
            # A tokenizer may end with an id that the head does not have.
            ends = ids([end for end in options.ends if end < self.vocabulary])
            masked = scores[:, ends].masked_fill(too_early, -torch.inf)
            scores = scores.index_copy(1, ends, masked)
        if options.banned:
            scores = scores.index_fill(1, ids(options.banned), -torch.inf)
        ruled_out = scores == -torch.inf
        if options.penalises:
            scores = self._penalised(scores, slot, options)
        most = MOST_SCORE[rows.dtype]
        rows.copy_(scores.clamp(-most, most).masked_fill(ruled_out, -torch.inf))
        nothing_left = ruled_out.all(1).any()
        failure = self.slots.failure
        failure[slot] = torch.where(nothing_left, int(Mark.NO_TOKEN_LEFT), failure[slot])

    def _penalised(self, scores: torch.Tensor, slot: int, options: RowOptions) -> torch.Tensor:
        """As vLLM's penalties, counting what stands before the canvas."""
        tokens = self.slots.history[slot].long().clamp(0, self.vocabulary - 1)
        at = torch.arange(len(tokens), device=tokens.device)
        before = at < torch.clamp(self.slots.start[slot], min=options.prompt_length)
        count = torch.zeros(self.vocabulary, device=scores.device)
        count.index_add_(0, tokens, (before & (at >= options.prompt_length)).float())
        seen = torch.zeros(self.vocabulary, device=scores.device)
        seen.index_add_(0, tokens, before.float())
        repeated = torch.where(scores > 0, scores / options.repetition, scores * options.repetition)
        scores = torch.where(seen > 0, repeated, scores)
        return scores - (options.frequency * count + options.presence * (count > 0))


def filtered(logits: torch.Tensor, slots: SlotState, on_host: np.ndarray) -> torch.Tensor:
    """Logits ``[n * L, vocabulary]`` without the tokens that filters exclude; those are -inf.

    The filters (top-k, top-p, min-p) of all requests that have one are one operation. Where no
    request has one, these are the same logits.
    """
    asking = [(n, options) for n, _, options in slots.with_row_options(on_host) if options.filters]
    if not asking:
        return logits
    each = [options for _, options in asking]
    if len(asking) == len(on_host):
        return _filtered(logits, each, slots.length)
    index = torch.tensor([n for n, _ in asking], device=logits.device)
    rows = logits.view(-1, slots.length, logits.shape[1])
    some = _filtered(rows[index].flatten(0, 1), each, slots.length)
    return rows.index_copy(0, index, some.view(len(index), *rows.shape[1:])).flatten(0, 1)


def _filtered(logits: torch.Tensor, options: list[RowOptions], length: int) -> torch.Tensor:
    """Logits ``[n * L, vocabulary]`` of ``n`` requests that all have filters."""
    device, vocabulary = logits.device, logits.shape[1]

    def each(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, device=device).repeat_interleave(length)

    if any(one.min_p for one in options):
        floor = logits.amax(-1) + each([max(one.min_p, 1e-30) for one in options]).log()
        logits = logits.masked_fill(logits < floor[:, None], -torch.inf)
    k = p = None
    if any(one.top_k for one in options):
        k = each([min(one.top_k or vocabulary, vocabulary) for one in options])
    if any(one.top_p < 1 for one in options):
        p = each([one.top_p for one in options])
    return apply_top_k_top_p(logits.clone(), k, p)
