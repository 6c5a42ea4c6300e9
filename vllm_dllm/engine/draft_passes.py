"""Passes that verify a draft: a canvas is read from left to right, by a model that reads masks.

An algorithm that `verifies_drafts` may ask for one (`Update.verify`). The pass reads a window of
two halves of L tokens, both at the canvas' positions: the canvas with the draft at its masked
positions, and L masks::

    first half, row i    sees the tokens before the canvas and x_0 ... x_i
    second half, row i   sees the tokens before the canvas, x_0 ... x_(i-1), and itself

So row i of the second half predicts position i as if blocks had one position. The algorithm gets
the statistics of these rows. No keys and values of the pass are kept.

Every step of such a server reads a window of two blocks (`engine.two_block_window`), so all steps
have the same length, and the scheduler need not know which of them verify. In the slots, the draft
stands at the masked positions of a canvas in `Phase.VERIFY`; algorithms and everything else get
masks there. This module is imported by servers with such an algorithm only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_dllm.decoding import Canvas, Update
from vllm_dllm.decoding.base import DraftContext
from vllm_dllm.engine.slots import AlgorithmBatch, Phase, SlotState, SlotStatus
from vllm_dllm.engine.to_device import to_device
from vllm_dllm.engine.two_block_window import TwoBlockWindow
from vllm_dllm.ops.noise.keyed import Stream, row_keys, uniform

if TYPE_CHECKING:
    from vllm_dllm.engine.step import StepOutcome


@dataclass(frozen=True)
class Drafts:
    """What the passes of a step have read, for the algorithms that verify drafts.

    Attributes:
        verified: bool ``[n]``, canvases in `Phase.VERIFY`.
        tokens: int64 ``[n, L]``, what their first halves held.
        chance: float32 ``[n, L]``, see `DraftContext`.
        vocabulary: number of token ids.
    """

    verified: torch.Tensor
    tokens: torch.Tensor
    chance: torch.Tensor
    vocabulary: int

    @classmethod
    def taken_from(cls, state: SlotState, now: SlotStatus) -> tuple[Drafts, SlotStatus]:
        """The drafts in the canvases of a batch, and the batch with masks in their place."""
        assert state.kind.mask_token is not None
        keys = row_keys(now.seed, now.start, now.step, Stream.ACCEPTANCE)
        tokens, masked = now.canvas.tokens, now.canvas.masked
        drafts = cls(
            verified=now.phase == int(Phase.VERIFY),
            tokens=tokens,
            chance=uniform(keys, state.position),
            vocabulary=state.kind.vocabulary,
        )
        canvas = replace(now.canvas, tokens=tokens.masked_fill(masked, state.kind.mask_token))
        return drafts, replace(now, canvas=canvas)

    def context(self, batch: AlgorithmBatch) -> DraftContext:
        """The part of an algorithm's canvases."""
        parts = self.verified, self.tokens, self.chance
        if batch.index is not None:
            parts = tuple(part.index_select(0, batch.index) for part in parts)
        return DraftContext(*parts, self.vocabulary)

    def following(
        self, updates: Sequence[Update], batches: Sequence[AlgorithmBatch]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`Update.verify` and `Update.draft` of the whole batch, bool ``[n]`` and int64 ``[n, L]``.

        They are false and 0 for algorithms without.
        """
        if batches[0].index is None:
            (only,) = updates
            assert only.verify is not None and only.draft is not None
            return only.verify, only.draft
        verify, draft = torch.zeros_like(self.verified), torch.zeros_like(self.tokens)
        for update, batch in zip(updates, batches, strict=True):
            if update.verify is not None and update.draft is not None:
                verify.index_copy_(0, batch.index, update.verify)
                draft.index_copy_(0, batch.index, update.draft)
        return verify, draft


def put_drafts(outcome: StepOutcome, phase: torch.Tensor) -> tuple[Canvas, torch.Tensor]:
    """The canvases to store after a step, with their drafts, and their phases, int64 ``[n]``.

    A canvas that leaves or waits for others has nothing to verify.
    """
    assert outcome.drafts is not None
    verify, draft = outcome.drafts
    canvas = outcome.canvas
    verify = verify & (outcome.ready == 0) & ~outcome.begins & canvas.masked.any(1)
    drafted = canvas.masked & verify[:, None]
    canvas = replace(canvas, tokens=torch.where(drafted, draft, canvas.tokens))
    return canvas, torch.where(verify, int(Phase.VERIFY), phase)


class DraftWindow(TwoBlockWindow):
    """A window of two blocks, or of a draft and masks."""

    def __init__(self, slots: SlotState, context: int) -> None:
        super().__init__(slots, context)
        self.phase = slots.phase

    def inputs(self, slot: torch.Tensor, canvas: torch.Tensor) -> torch.Tensor:
        """See `TwoBlockWindow.inputs`."""
        verifies = (self.phase[slot] == int(Phase.VERIFY))[:, None]
        draft = torch.cat([canvas, self.masks.expand_as(canvas)], 1)
        return torch.where(verifies, draft, super().inputs(slot, canvas))

    def canvas_rows(
        self, hidden: torch.Tensor, slot: torch.Tensor, is_window: np.ndarray
    ) -> torch.Tensor:
        """See `TwoBlockWindow.canvas_rows`; of a draft, these are the rows of the masks."""
        if not is_window.all():
            slot = slot[to_device(np.flatnonzero(is_window), slot.device)]
        windows = hidden.view(len(slot), 2, self.length, hidden.shape[-1])
        second = self.has_block[slot] | (self.phase[slot] == int(Phase.VERIFY))
        return windows[torch.arange(len(slot), device=hidden.device), second.long()].flatten(0, 1)
