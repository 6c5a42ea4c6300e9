"""A window of two blocks: every step reads the finished block and the canvas after it.

A finished canvas leaves immediately (`CommitPolicy.fused`), and its final keys and values are
written while the next canvas is denoised. The block-causal mask hides the canvas from the block.
`startup.commit_choice` says when this way of committing is taken.

With blocks of 4, a third to a half of all passes would otherwise only commit. Every later step
reads the block again, which changes nothing. To vLLM a window is 2 L draft tokens. Its scheduler
always grants that many and counts the tokens that leave as accepted drafts; it never needs the
worker's position. So a step may be in flight, and one CUDA graph is enough:

    step                            tokens   accepted by the scheduler   the worker goes on by
    denoise                         2 L      0                           0
    the first canvas is finished    2 L      those after the prompt      0
    another canvas is finished      2 L      L                           L

The first canvas of a request has no block before it to write. It comes first in the window and is
followed by masks, whose keys and values are never read. If those masks would lie beyond the end of
the context, the prompt's last whole block is read again instead; see also `keep_prompts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.v1.attention.backends.utils import PAD_SLOT_ID

from vllm_dllm.engine.input_ids import first_tokens
from vllm_dllm.engine.slots import SlotState
from vllm_dllm.engine.to_device import to_device


class TwoBlockWindow:
    """The contents of each slot's window other than the canvas."""

    def __init__(self, slots: SlotState, context: int) -> None:
        """Allocate a window for each slot; `context` is the server's context length in tokens."""
        self.length = slots.length
        self.context = context
        self.block = torch.zeros_like(slots.tokens)  # the finished block before the canvas
        # [slots], whether the window begins with that block rather than the canvas.
        self.has_block = torch.zeros_like(slots.read_only)
        # [slots], in host memory: where that block ends if it is the prompt's last one, or 0.
        self.prompt_end: np.ndarray = np.zeros(len(slots.tokens), dtype=np.int64)
        assert slots.kind.mask_token is not None
        self.masks = torch.full_like(slots.tokens[:1], slots.kind.mask_token)  # [1, L]

    def enter(self, slot: int, known: Sequence[int]) -> None:
        """Lay out the window of a request that starts or resumes with these tokens."""
        start = len(known) - len(known) % self.length
        has_block = start + 2 * self.length > self.context
        self.has_block[slot].fill_(has_block)
        self.prompt_end[slot] = start if has_block else 0
        if has_block:
            row: np.ndarray = np.array(known[start - self.length : start], dtype=np.int64)
            self.block[slot].copy_(to_device(row, self.block.device))

    def inputs(self, slot: torch.Tensor, canvas: torch.Tensor) -> torch.Tensor:
        """The tokens to read next, int64 ``[n, 2 L]``, where the canvases are ``[n, L]``."""
        masks = self.masks.expand_as(canvas)
        has_block = self.has_block[slot][:, None]
        first = torch.where(has_block, self.block[slot], canvas)
        return torch.cat([first, torch.where(has_block, canvas, masks)], 1)

    def keep_prompts(self, input_batch: Any, stored: torch.Tensor) -> None:
        """Keep what the cache has of prompts, if a window reads their tokens without pictures.

        `stored` says where the keys and values of a step go, int64 ``[KV cache groups, tokens]``;
        it is changed in place.
        """
        drafts = input_batch.num_draft_tokens_per_req
        if drafts is None:
            return
        end = self.prompt_end[input_batch.idx_mapping_np[: len(drafts)]]
        rows = np.flatnonzero((end > 0) & (drafts > 0))
        if not len(rows):
            return
        count = input_batch.num_scheduled_tokens[rows]
        _, at = first_tokens(input_batch, rows, count, stored.device)
        of_prompt = input_batch.positions[at] < to_device(np.repeat(end[rows], count), at.device)
        stored[:, at] = stored[:, at].masked_fill(of_prompt, PAD_SLOT_ID)

    def canvas_rows(
        self, hidden: torch.Tensor, slot: torch.Tensor, is_window: np.ndarray
    ) -> torch.Tensor:
        """Select the hidden states ``[n L, hidden]`` of the canvases from those of their windows.

        `slot` are the slots of a batch, and `is_window` is true for the n that have a window.
        """
        if not is_window.all():
            slot = slot[to_device(np.flatnonzero(is_window), slot.device)]
        windows = hidden.view(len(slot), 2, self.length, hidden.shape[-1])
        row = torch.arange(len(slot), device=hidden.device)
        return windows[row, self.has_block[slot].long()].flatten(0, 1)

    def move(self, slot: torch.Tensor, leaves: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Put canvases that leave, with these tokens (int64 ``[n, L]``), before the next ones.

        Returns the number of tokens of each window that are read again, int64 ``[n]``: 2 L, or L
        where the window moves.
        """
        had_block = self.has_block[slot]
        block = torch.where(leaves[:, None], tokens, self.block[slot])
        self.block.index_copy_(0, slot, block)
        self.has_block.index_copy_(0, slot, had_block | leaves)
        return 2 * self.length - (leaves & had_block) * self.length
