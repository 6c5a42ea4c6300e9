"""Self-conditioning: a canvas is read together with the model's last prediction of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from vllm_dllm.engine.slots import Phase, SlotState
from vllm_dllm.engine.to_device import to_device

# The model's module that combines embeddings and soft embeddings, ``[tokens, hidden]`` each, into
# conditioned embeddings of that shape.
GatedMLP = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class SelfConditioning:
    """Stores the soft embeddings of slots, and applies them to the model's input embeddings.

    Attributes:
        soft: ``[slots, L, hidden]`` in the model's dtype, zero where there is no prediction yet.
    """

    def __init__(
        self, slots: SlotState, hidden_size: int, module: GatedMLP, scale: torch.Tensor
    ) -> None:
        self.slots = slots
        self.module = module
        self.scale = scale
        shape = (*slots.tokens.shape, hidden_size)
        self.soft = torch.zeros(shape, dtype=scale.dtype, device=slots.device)

    def store(
        self, slot: torch.Tensor, soft: torch.Tensor, keep: torch.Tensor, fixed: torch.Tensor
    ) -> None:
        """Store predictions, or zeros where none is kept and where a position is pinned.

        Args:
            slot: int64 ``[n]``.
            soft: float32 ``[n, L, hidden]``, before the embedding's scale.
            keep: bool ``[n]``, canvases whose predictions are kept.
            fixed: bool ``[n, L]``, their positions that never change.
        """
        predicted = keep[:, None] & ~fixed
        scaled = soft.to(self.scale.dtype) * self.scale
        self.soft.index_copy_(0, slot, torch.where(predicted[..., None], scaled, 0.0))

    def clear(self, slot: int) -> None:
        """Drop the predictions of ``slot``, because a new request has entered it."""
        self.soft[slot].zero_()

    def drop(self, slot: torch.Tensor) -> None:
        """Drop the predictions of ``slot`` (int64 ``[n]``): none of its canvases goes on."""
        self.soft.index_fill_(0, slot, 0.0)

    def apply(self, embeddings: torch.Tensor, input_batch: Any) -> None:
        """Condition the embeddings ``[tokens, hidden]`` of canvases that are denoised, in place."""
        rows = input_batch.num_reqs
        widths = np.diff(input_batch.cu_num_logits_np[: rows + 1])
        length = self.slots.length
        if (widths == length).all():
            slot = input_batch.idx_mapping[:rows].long()
            token: torch.Tensor | slice = slice(0, rows * length)
            soft = self.soft[slot].flatten(0, 1)
            slot = slot.repeat_interleave(length)
        else:
            row_of: np.ndarray = np.repeat(np.arange(rows), widths)
            nth = np.arange(len(row_of)) - np.repeat(np.cumsum(widths) - widths, widths)
            start = input_batch.query_start_loc_np[row_of]
            index: np.ndarray = np.stack([row_of, nth, start + nth]).astype(np.int64)
            row, position, token = to_device(index, embeddings.device)
            slot = input_batch.idx_mapping[row].long()
            soft = self.soft[slot, position]
        plain = embeddings[token]
        denoised = self.slots.phase[slot] == Phase.DENOISE
        conditioned = self.module(plain, soft)
        embeddings[token] = torch.where(denoised[:, None], conditioned, plain)
