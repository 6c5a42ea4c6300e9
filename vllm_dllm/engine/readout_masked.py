"""A masked model's readout: one pass over the head, a few canvases at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from vllm_dllm.engine.contracts import Readings, StepPlan
from vllm_dllm.engine.optional_parts import OptionalParts
from vllm_dllm.engine.slots import SlotState
from vllm_dllm.ops.compiled import CompiledOnce
from vllm_dllm.ops.statistics.rows import RowStatistics, grouped_statistics, row_statistics

if TYPE_CHECKING:
    from vllm_dllm.engine.token_choice import MaskedPipeline, StatisticsOfRows
    from vllm_dllm.ops.statistics.head import Head

# How many bytes whole rows of logits may use at a time, if they were float32. On a GPU, every part
# of a batch launches kernels of its own.
HEAD_BYTES_CPU = 256 << 20
HEAD_BYTES_GPU = 1 << 30


def compiled_statistics() -> StatisticsOfRows:
    """`row_statistics`, compiled once: entropies are always computed, in the same loop."""
    own = CompiledOnce(grouped_statistics)

    def statistics(logits: torch.Tensor, forbidden: int, entropy: bool = False) -> RowStatistics:
        found = own(logits, forbidden)
        return found if entropy else RowStatistics(found.token, found.probability)

    return statistics


class MaskedReadout:
    """See `Readout`. The mask token is never chosen."""

    def __init__(
        self,
        head: Callable[[torch.Tensor], torch.Tensor],
        slots: SlotState,
        parts: OptionalParts,
        compile: bool = False,
        fused: Head | None = None,
    ) -> None:
        """Read with torch, or with Triton kernels, which need no logits for the likeliest tokens.

        `fused` is the head that these kernels multiply with, or None for torch.
        `head` maps hidden states ``[rows, hidden]`` to logits ``[rows, vocabulary]``; if it is
        spread over ranks, they exchange logits.
        """
        assert slots.kind.mask_token is not None
        self.head = head
        self.slots = slots
        self.parts = parts
        self.mask_token = slots.kind.mask_token
        most = HEAD_BYTES_CPU if slots.device.type == "cpu" else HEAD_BYTES_GPU
        self.canvases = max(1, most // (4 * slots.kind.vocabulary * slots.length))
        self.fused = fused
        self.triton = fused is not None
        self.compile = compile
        self.statistics = compiled_statistics() if compile else row_statistics

    @cached_property
    def pipeline(self) -> MaskedPipeline:
        """The pipeline that chooses tokens from whole rows of logits."""
        from vllm_dllm.engine.token_choice import MaskedPipeline

        made = MaskedPipeline
        if self.triton and self.slots.kind.draw_confidence is None:
            from vllm_dllm.engine.readout_triton import MaskedKernelPipeline

            made = MaskedKernelPipeline
        return made(self.parts, self.mask_token, self.statistics, self.compile)

    def read(self, hidden: torch.Tensor, plan: StepPlan) -> Readings:
        """See `Readout`."""
        if (
            plan.draws
            or plan.needs_rows
            or plan.constraint is not None
            or plan.adjust is not None
            or plan.reads_logits
        ):
            return self.pipeline.readings(self.head, hidden, plan, self.canvases)
        return Readings(self._likeliest(hidden, plan).view(-1, self.slots.length))

    def _likeliest(self, hidden: torch.Tensor, plan: StepPlan) -> RowStatistics:
        """Statistics ``[rows]`` of the likeliest tokens."""
        if self.fused is not None:
            return self._by_kernels(hidden, self.fused, plan.batch.entropy)
        rows = None if plan.masked is None else plan.masked_rows()
        if rows is None:
            return self._of_rows(hidden, plan.batch.entropy)
        found = self._of_rows(hidden.index_select(0, rows), plan.batch.entropy)
        return found.spread(rows, len(hidden))

    def _by_kernels(self, hidden: torch.Tensor, head: Head, entropy: bool) -> RowStatistics:
        from vllm_dllm.ops.statistics.rows_triton import head_statistics

        partials = head_statistics(hidden, head, self.mask_token)
        return partials.merge_ranks(head.shard).greedy_statistics(entropy)

    def _of_rows(self, hidden: torch.Tensor, entropy: bool) -> RowStatistics:
        """Statistics of these rows, some at a time."""
        at_once = self.canvases * self.slots.length
        parts = [
            self.statistics(self.head(rows), self.mask_token, entropy)
            for rows in ((hidden,) if len(hidden) <= at_once else hidden.split(at_once))
        ]
        return type(parts[0]).join(parts)

    def warm_up(self, hidden: torch.Tensor) -> None:
        """See `Readout`."""
        if self.fused is not None:
            from vllm_dllm.ops.statistics.rows_triton import TILE_ROWS

            for rows in TILE_ROWS:
                self._by_kernels(hidden[:rows], self.fused, entropy=False)
        self.pipeline.warm_up(self.head(hidden))
