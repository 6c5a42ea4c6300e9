"""Self-conditioning: a canvas is read together with the model's last prediction of it."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch

from vllm_dllm.worker.slots import Phase, SlotState


class GatedMLP(Protocol):
    """The model's own module: (embeddings, soft embeddings), ``[tokens, hidden]`` each."""

    def __call__(self, embeddings: torch.Tensor, soft: torch.Tensor) -> torch.Tensor:
        """Conditioned embeddings ``[tokens, hidden]``."""
        ...


class SelfConditioning:
    """The soft embeddings of slots that denoise next, and where they enter the model.

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

    def store(self, slot: torch.Tensor, soft: torch.Tensor, keep: torch.Tensor) -> None:
        """Keep the predictions ``[n, L, hidden]`` of ``slot`` ``[n]`` where ``keep`` ``[n]``.

        A pinned position is given, not predicted: it brings no prediction along.
        """
        wanted = keep[:, None] & ~self.slots.fixed[slot]
        scaled = soft.to(self.scale.dtype) * self.scale
        self.soft.index_copy_(0, slot, torch.where(wanted[..., None], scaled, 0.0))

    def clear(self, slot: int) -> None:
        """A request has entered ``slot``."""
        self.soft[slot].zero_()

    def apply(self, embeddings: torch.Tensor, input_batch: Any) -> None:
        """Condition the embeddings ``[tokens, hidden]`` of canvases that are denoised, in place.

        Prompts and canvases that are committed go through the model as they are: they are
        what DiffusionGemma calls the encoder.
        """
        rows = input_batch.num_reqs
        widths = np.diff(input_batch.cu_num_logits_np[: rows + 1])
        length = self.slots.length
        if (widths == length).all():
            slot = input_batch.idx_mapping[:rows].long()
            token: torch.Tensor | slice = slice(0, rows * length)
            soft = self.soft[slot].flatten(0, 1)
            slot = slot.repeat_interleave(length)
        else:
            of: np.ndarray = np.repeat(np.arange(rows), widths)
            nth = np.arange(len(of)) - np.repeat(np.cumsum(widths) - widths, widths)
            start = input_batch.query_start_loc_np[of]
            row, position, token = (
                torch.from_numpy(a.astype(np.int64)).to(embeddings.device, non_blocking=True)
                for a in (of, nth, start + nth)
            )
            slot = input_batch.idx_mapping[row].long()
            soft = self.soft[slot, position]
        plain = embeddings[token]
        denoised = self.slots.phase[slot] == Phase.DENOISE
        conditioned = self.module(plain, soft)
        embeddings[token] = torch.where(denoised[:, None], conditioned, plain)
