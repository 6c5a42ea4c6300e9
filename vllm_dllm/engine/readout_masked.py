"""A masked model's readout: one pass over the head, a few canvases at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from vllm_dllm.engine.readout import Readings, ReadRequest
from vllm_dllm.engine.slots import SlotState
from vllm_dllm.ops.compiled import compiled
from vllm_dllm.ops.statistics.rows import RowStatistics, pure_row_statistics, row_statistics

if TYPE_CHECKING:
    from vllm_dllm.engine.optional_parts import OptionalParts
    from vllm_dllm.engine.readout_triton import MaskedKernels
    from vllm_dllm.engine.token_choice import Draw, MaskedPipeline
    from vllm_dllm.ops.noise.keyed import Counters

# How many bytes whole rows of logits may use at a time.
HEAD_BYTES = 256 << 20


class MaskedReadout:
    """See `Readout`. The mask token is never chosen.

    Attributes:
        head: computes logits ``[rows, vocabulary]`` from hidden states ``[rows, hidden]``; if the
            head is spread over ranks, they exchange logits.
        canvases: how many canvases are computed at a time.
        kernels: Triton kernels, which need no logits for the likeliest tokens; None for torch.
        compile: whether torch compiles what runs after the head.
        statistics: a function like `row_statistics`.
    """

    def __init__(
        self,
        head: Callable[[torch.Tensor], torch.Tensor],
        slots: SlotState,
        parts: OptionalParts,
        compile: bool = False,
        kernels: MaskedKernels | None = None,
    ) -> None:
        if slots.kind.mask_token is None:
            raise ValueError("this readout is for models with a mask token")
        self.head = head
        self.slots = slots
        self.parts = parts
        self.mask_token = slots.kind.mask_token
        self.canvases = max(1, HEAD_BYTES // (4 * slots.kind.vocabulary * slots.length))
        self.kernels = kernels
        self.compile = compile
        own = compiled(pure_row_statistics) if compile else row_statistics
        self.statistics = own if kernels is None else kernels.from_logits

    @cached_property
    def keys(self) -> Callable[[Counters], torch.Tensor]:
        """`candidate_keys`, compiled or not."""
        from vllm_dllm.ops.noise.keyed import candidate_keys

        return compiled(candidate_keys) if self.compile else candidate_keys

    @cached_property
    def draw(self) -> Draw:
        """`sampled.draw`, compiled or not."""
        from vllm_dllm.ops.statistics.sampled import draw

        return compiled(draw) if self.compile else draw

    @cached_property
    def pipeline(self) -> MaskedPipeline:
        """The pipeline that chooses tokens from whole rows of logits."""
        from vllm_dllm.engine.token_choice import MaskedPipeline

        return MaskedPipeline(self.parts, self.mask_token, self.statistics, self.draw)

    def read(self, hidden: torch.Tensor, request: ReadRequest) -> Readings:
        """See `Readout`."""
        if (
            request.draws
            or request.needs_rows
            or request.constraint is not None
            or request.adjust is not None
            or request.ask is not None
        ):
            return self._from_logits(hidden, request)
        return Readings(self._likeliest(hidden, request.entropy).view(-1, self.slots.length))

    def _likeliest(self, hidden: torch.Tensor, entropy: bool) -> RowStatistics:
        """Statistics ``[rows]`` of the likeliest tokens."""
        if self.kernels is not None:
            return self.kernels.from_hidden(hidden, self.mask_token, entropy)
        at_once = self.canvases * self.slots.length
        if len(hidden) <= at_once:
            return self.statistics(self.head(hidden), self.mask_token, entropy)
        parts = [
            self.statistics(self.head(rows), self.mask_token, entropy)
            for rows in hidden.split(at_once)
        ]
        return type(parts[0]).join(parts)

    def _from_logits(self, hidden: torch.Tensor, request: ReadRequest) -> Readings:
        """Readings from whole rows of logits, a few canvases at a time."""
        length, count = self.slots.length, len(request.slots)
        statistics, logprob, asked = [], [], []
        copies = self.pipeline.copies_rows(request.on_host)  # which double the memory
        at_once = max(1, self.canvases // 2) if copies else self.canvases
        for first in range(0, count, at_once):
            end = min(first + at_once, count)
            part = request.part(first, end)
            logits = self.head(hidden[first * length : end * length])
            keys = self.keys_of(part.slots).view(-1, length) if request.draws else None
            chosen = self.pipeline.read(logits, part, keys)
            statistics.append(chosen.statistics)
            if chosen.logprob is not None:
                logprob.append(chosen.logprob)
            if part.ask is not None:
                ids = part.ask.flatten(0, 1)  # [rows, K]
                total = logits.float().logsumexp(-1, keepdim=True)
                asked.append(logits.gather(1, ids).float() - total)
            del logits, chosen  # the rows of one part at a time
        joined = type(statistics[0]).join(statistics).view(-1, length)
        return Readings(
            joined,
            log_probabilities=torch.cat(asked).view(count, length, -1) if asked else None,
            logprob=torch.cat(logprob).view(-1, length) if logprob else None,
        )

    def keys_of(self, slots: torch.Tensor) -> torch.Tensor:
        """Keys of the random numbers of all positions of ``slots`` (int64 ``[n]``): ``[n * L]``."""
        from vllm_dllm.ops.noise.keyed import Counters

        return self.keys(Counters.of_canvases(self.slots, slots))

    def warm_up(self, hidden: torch.Tensor) -> None:
        """See `Readout`."""
        logits = self.head(hidden)
        for entropy in (False, True):
            self.statistics(logits, self.mask_token, entropy)
        self.keys_of(torch.tensor([0], device=hidden.device))
        # Make it contiguous, as in a step: the head may return a view of a wider tensor.
        scaled = logits.float().contiguous()
        self.draw(scaled, torch.arange(len(hidden), device=hidden.device))
