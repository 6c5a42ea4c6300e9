"""Biases and filters: how a request's parameters change whole rows of logits.

Biases are applied in vLLM's order: allowed ids, bias, minimum length, bans, penalties. Penalties
count the tokens before the canvas only, so that the tokens of a canvas do not depend on the order
in which they are decided.
"""

from __future__ import annotations

import numpy as np
import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from vllm_dllm.engine.readout.contract import ReadRequest
from vllm_dllm.engine.row_options import RowOptionTensors, RowWork
from vllm_dllm.engine.slots import Mark, SlotState
from vllm_dllm.engine.to_device import to_device

# The largest score, by the dtype of logits. Divided by any temperature (at least 0.01) it stays
# finite.
MOST_SCORE = {torch.float32: 1e30, torch.bfloat16: 1e30, torch.float16: 6e4}


class LogitBiases:
    """Biases the logits of the requests of a batch that have biases, all of them together."""

    def __init__(self, slots: SlotState, vocabulary: int) -> None:
        self.slots = slots
        self.vocabulary = vocabulary
        self.options = slots.row_tensors

    def apply(self, logits: torch.Tensor, request: ReadRequest) -> None:
        """Apply the biases of a batch to its logits ``[n * L, vocabulary]``, in place."""
        canvases = logits.view(-1, self.slots.length, logits.shape[1])
        asking = _asking(self.options, request, RowWork.BIASES)
        if asking is None:
            return
        index, slots, on_host = asking
        own = canvases if index is None else canvases.index_select(0, index)
        self._apply(own, slots, on_host)
        if index is not None:
            canvases.index_copy_(0, index, own)

    def _apply(self, canvases: torch.Tensor, slots: torch.Tensor, on_host: np.ndarray) -> None:
        """Bias the logits of canvases, ``[n, L, vocabulary]``, in place.

        For any parameters, the results are finite numbers, or -inf for tokens that are ruled out.
        """
        options, work = self.options, self.options.work_of(on_host)
        scores = canvases.float()  # the same tensor if it is float32 already
        if work & RowWork.SHIFT:
            shift = options.shifts(on_host)[:, None]
            scores.add_(shift).masked_fill_(shift == -torch.inf, -torch.inf)
        if work & RowWork.MIN_TOKENS:
            before = self.slots.start.index_select(0, slots) - options.of("prompt_length", slots)
            nth = before[:, None] + self.slots.position  # in the output, [n, L]
            too_early = nth < options.of("min_tokens", slots)[:, None]
            scores.masked_fill_(too_early[..., None] & options.ends(on_host)[:, None], -torch.inf)
        ruled_out = scores == -torch.inf
        if work & RowWork.PENALTIES:
            self._penalise(scores, slots)
        most = MOST_SCORE[canvases.dtype]
        canvases.copy_(scores.clamp_(-most, most).masked_fill_(ruled_out, -torch.inf))
        nothing_left = ruled_out.all(2).any(1)
        failure = self.slots.failure
        marked = failure.index_select(0, slots).masked_fill(nothing_left, int(Mark.NO_TOKEN_LEFT))
        failure.index_copy_(0, slots, marked)

    def _penalise(self, scores: torch.Tensor, slots: torch.Tensor) -> None:
        """Apply vLLM's penalties to scores ``[n, L, vocabulary]``, in place.

        They are for the tokens before the canvas.
        """
        history = self.slots.history.index_select(0, slots)
        tokens = history.long().clamp_(0, self.vocabulary - 1)  # [n, positions]
        prompt_length = self.options.of("prompt_length", slots)[:, None]
        start = self.slots.start.index_select(0, slots)[:, None]
        position = torch.arange(tokens.shape[1], device=tokens.device)
        before = position < torch.maximum(start, prompt_length)
        seen = torch.zeros((len(slots), self.vocabulary), device=scores.device)
        count = torch.zeros_like(seen)
        seen.scatter_add_(1, tokens, before.float())
        count.scatter_add_(1, tokens, (before & (position >= prompt_length)).float())

        def number(name: str) -> torch.Tensor:
            return self.options.of(name, slots)[:, None]

        repetition = torch.where(seen > 0, number("repetition"), 1.0)[:, None]
        positive = scores > 0
        # One large temporary at a time.
        scores.div_(torch.where(positive, repetition, 1.0))
        scores.mul_(torch.where(positive, 1.0, repetition))
        scores.sub_((number("frequency") * count + number("presence") * (count > 0))[:, None])


def _asking(
    options: RowOptionTensors, request: ReadRequest, work: RowWork
) -> tuple[torch.Tensor | None, torch.Tensor, np.ndarray] | None:
    """The canvases of a batch whose requests ask for any of this work, or None if none does.

    Returns:
        Their positions in the batch (int64 ``[m]``, None for the whole batch), and their slots on
        the device and on the host.
    """
    asks = options.work[request.on_host] & work > 0
    if not asks.any():
        return None
    if asks.all():
        return None, request.slots, request.on_host
    index = to_device(np.flatnonzero(asks), request.slots.device)
    return index, request.slots.index_select(0, index), request.on_host[asks]


def filtered(logits: torch.Tensor, slots: SlotState, request: ReadRequest) -> torch.Tensor:
    """Logits ``[n * L, vocabulary]`` in which the tokens that filters exclude are -inf.

    The filters (top-k, top-p, min-p) of all requests of the batch are applied together. Where no
    request has a filter, the given logits are returned.
    """
    asking = _asking(slots.row_tensors, request, RowWork.FILTERS)
    if asking is None:
        return logits
    index, own_slots, on_host = asking
    if index is None:
        return _filtered(logits, slots, own_slots, on_host)
    canvases = logits.view(-1, slots.length, logits.shape[1])
    own = canvases.index_select(0, index)
    changed = _filtered(own.flatten(0, 1), slots, own_slots, on_host)
    return canvases.index_copy(0, index, changed.view_as(own)).flatten(0, 1)


def _filtered(
    logits: torch.Tensor, state: SlotState, slots: torch.Tensor, on_host: np.ndarray
) -> torch.Tensor:
    """Filter the logits ``[n * L, vocabulary]`` of ``slots`` (int64 ``[n]``), which all ask."""
    options, work = state.row_tensors, state.row_tensors.work_of(on_host)

    def per_row(name: str) -> torch.Tensor:
        return options.of(name, slots).repeat_interleave(state.length)

    if work & RowWork.MIN_P:
        floor = logits.amax(-1) + per_row("min_p").log()
        logits = logits.masked_fill(logits < floor[:, None], -torch.inf)
    k = per_row("top_k") if work & RowWork.TOP_K else None
    p = per_row("top_p") if work & RowWork.TOP_P else None
    return apply_top_k_top_p(logits.clone(), k, p)
