"""A masked model's readout from whole rows of logits, computed in parts that fit in memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from vllm_dllm.engine.readout import HEAD_BYTES, Readings, ReadRequest
from vllm_dllm.engine.slots import SlotState
from vllm_dllm.ops.compiled import compiled
from vllm_dllm.ops.noise.keyed import Counters, candidate_keys
from vllm_dllm.ops.statistics.head import Head
from vllm_dllm.ops.statistics.rows import RowStatistics, pure_row_statistics, row_statistics
from vllm_dllm.ops.statistics.sampled import draw

if TYPE_CHECKING:
    from vllm_dllm.engine.optional_parts import OptionalParts
    from vllm_dllm.engine.token_choice import LogitsPipeline, MaskedRows


class DenseReadout:
    """See `Readout`. The mask token is never chosen.

    Subclasses compute statistics without logits where they can. If a request of the batch needs
    whole rows of logits for more than a choice or a draw, the batch uses the logits here.

    Attributes:
        head: computes logits ``[rows, vocabulary]`` from hidden states ``[rows, hidden]``.
        canvases: how many canvases are computed at a time.
        statistics: a function like `row_statistics`.
        keys: `candidate_keys`, compiled or not.
        draw: `sampled.draw`, compiled or not.
    """

    def __init__(
        self,
        head: Callable[[torch.Tensor], torch.Tensor],
        slots: SlotState,
        parts: OptionalParts,
        compile: bool = False,
    ) -> None:
        if slots.kind.mask_token is None:
            raise ValueError("this readout is for models with a mask token")
        self.head = head
        self.slots = slots
        self.parts = parts
        self.mask_token = slots.kind.mask_token
        self.canvases = max(1, HEAD_BYTES // (4 * slots.kind.vocabulary * slots.length))
        self.compile = compile
        self.keys = compiled(candidate_keys) if compile else candidate_keys
        self.statistics = self._statistics_of_rows()
        self.draw = compiled(draw) if compile else draw

    @cached_property
    def pipeline(self) -> LogitsPipeline[MaskedRows]:
        """The pipeline that chooses tokens from whole rows of logits."""
        from vllm_dllm.engine.token_choice import LogitsPipeline, MaskedChoice

        choice = MaskedChoice(self.parts, self.mask_token, self.statistics, self.draw)
        return LogitsPipeline(self.parts, choice)

    def _statistics_of_rows(self) -> Callable[[torch.Tensor, int, bool], RowStatistics]:
        return compiled(pure_row_statistics) if self.compile else row_statistics

    def read(self, hidden: torch.Tensor, request: ReadRequest) -> Readings:
        """See `Readout`."""
        adjusts, asks = request.adjust is not None, request.ask is not None
        if request.needs_rows or request.constraint is not None or adjusts or asks:
            return self._from_logits(hidden, request)
        if request.draws:
            return self._drawn(hidden, request)
        return Readings(self._likeliest(hidden, request.entropy).view(-1, self.slots.length))

    def _likeliest(self, hidden: torch.Tensor, entropy: bool) -> RowStatistics:
        """Statistics ``[rows]`` of the likeliest tokens."""
        at_once = self.canvases * self.slots.length
        if len(hidden) <= at_once:
            return self.statistics(self.head(hidden), self.mask_token, entropy)
        parts = [
            self.statistics(self.head(rows), self.mask_token, entropy)
            for rows in hidden.split(at_once)
        ]
        return type(parts[0]).join(parts)

    def _drawn(self, hidden: torch.Tensor, request: ReadRequest) -> Readings:
        """Readings with drawn tokens (see `with_drawn`); this class computes logits for them."""
        return self._from_logits(hidden, request)

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
        log_p = torch.cat(asked).view(count, length, -1) if asked else None
        return Readings(
            joined,
            log_probabilities=log_p,
            logprob=torch.cat(logprob).view(-1, length) if logprob else None,
        )

    def keys_of(self, slots: torch.Tensor) -> torch.Tensor:
        """Keys of the random numbers of all positions of ``slots`` (int64 ``[n]``): ``[n * L]``."""
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


class TilesReadout(DenseReadout):
    """A `DenseReadout` whose subclasses also read the head in tiles, without logits.

    Attributes:
        tiles: the same head, for computations without logits.
    """

    def __init__(
        self,
        head: Callable[[torch.Tensor], torch.Tensor],
        tiles: Head,
        slots: SlotState,
        parts: OptionalParts,
        compile: bool = False,
    ) -> None:
        super().__init__(head, slots, parts, compile)
        self.tiles = tiles
