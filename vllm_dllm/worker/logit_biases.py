"""Biases and filters: how a request's parameters change whole rows of logits.

Biases are applied in vLLM's order: allowed ids, bias, minimum length, bans, penalties. Penalties
count the tokens before the canvas only, so that the tokens of a canvas do not depend on the order
in which they are decided.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from vllm_dllm.worker.row_options import RowOptions
from vllm_dllm.worker.slots import Mark, SlotState

# The largest score, by the dtype of logits. Divided by any temperature (at least 0.01) it stays
# finite.
MOST_SCORE = {torch.float32: 1e30, torch.bfloat16: 1e30, torch.float16: 6e4}


class LogitBiases:
    """Biases the logits of requests that have biases, in a loop over those requests."""

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
        """Bias the logits of one canvas, ``[L, vocabulary]``, in place.

        For any parameters, the results are finite numbers, or -inf for tokens that are ruled out.
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
            index = self.slots.start[slot] + self.slots.position - options.prompt_length
            too_early = (index < options.min_tokens)[:, None]  # [L, 1]
            # A tokenizer's end token may have an id that the head does not have.
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
        """Scores ``[L, vocabulary]`` with vLLM's penalties for the tokens before the canvas."""
        tokens = self.slots.history[slot].long().clamp(0, self.vocabulary - 1)
        position = torch.arange(len(tokens), device=tokens.device)
        before = position < torch.clamp(self.slots.start[slot], min=options.prompt_length)
        count = torch.zeros(self.vocabulary, device=scores.device)
        count.index_add_(0, tokens, (before & (position >= options.prompt_length)).float())
        seen = torch.zeros(self.vocabulary, device=scores.device)
        seen.index_add_(0, tokens, before.float())
        repeated = torch.where(scores > 0, scores / options.repetition, scores * options.repetition)
        scores = torch.where(seen > 0, repeated, scores)
        return scores - (options.frequency * count + options.presence * (count > 0))


def filtered(logits: torch.Tensor, slots: SlotState, on_host: np.ndarray) -> torch.Tensor:
    """Logits ``[n * L, vocabulary]`` in which the tokens that filters exclude are -inf.

    The filters (top-k, top-p, min-p) of all requests of the batch are applied together. Where no
    request has a filter, the given logits are returned.
    """
    asking = [(n, options) for n, _, options in slots.with_row_options(on_host) if options.filters]
    if not asking:
        return logits
    all_options = [options for _, options in asking]
    if len(asking) == len(on_host):
        return _filtered(logits, all_options, slots.length)
    index = torch.tensor([n for n, _ in asking], device=logits.device)
    canvases = logits.view(-1, slots.length, logits.shape[1])
    changed = _filtered(canvases[index].flatten(0, 1), all_options, slots.length)
    changed = changed.view(len(index), *canvases.shape[1:])
    return canvases.index_copy(0, index, changed).flatten(0, 1)


def _filtered(logits: torch.Tensor, all_options: list[RowOptions], length: int) -> torch.Tensor:
    """Filter the logits ``[n * L, vocabulary]`` of ``n`` requests that all have filters."""
    device, vocabulary = logits.device, logits.shape[1]

    def per_row(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, device=device).repeat_interleave(length)

    if any(options.min_p for options in all_options):
        min_p = per_row([max(options.min_p, 1e-30) for options in all_options])
        floor = logits.amax(-1) + min_p.log()
        logits = logits.masked_fill(logits < floor[:, None], -torch.inf)
    k = p = None
    if any(options.top_k for options in all_options):
        k = per_row([min(options.top_k or vocabulary, vocabulary) for options in all_options])
    if any(options.top_p < 1 for options in all_options):
        p = per_row([options.top_p for options in all_options])
    return apply_top_k_top_p(logits.clone(), k, p)
