"""Readouts over tiles of the head.

`ShardedReadout` is for masked models whose head is spread over ranks, which exchange statistics.
`TiledReadout` is for models of uniform noise, and also computes the soft embedding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_dllm.engine.readout import (
    HEAD_BYTES,
    Readings,
    ReadRequest,
    batch_extremes,
    tile_budget,
)
from vllm_dllm.engine.readout_dense import TilesReadout
from vllm_dllm.engine.slots import SlotState
from vllm_dllm.ops.compiled import compiled
from vllm_dllm.ops.noise.keyed import Counters, step_noise
from vllm_dllm.ops.statistics.head import Head
from vllm_dllm.ops.statistics.partials import average
from vllm_dllm.ops.statistics.rows import (
    RowStatistics,
    SampledStatistics,
    drawn_logprob,
    with_drawn,
)
from vllm_dllm.ops.statistics.sharded import sharded_statistics, without
from vllm_dllm.ops.statistics.tiled import Result, example_budgets, tiled_statistics

if TYPE_CHECKING:
    from vllm_dllm.engine.optional_parts import OptionalParts
    from vllm_dllm.engine.token_choice import LogitsPipeline, NoiseRows

_FIELDS = tuple(f.name for f in fields(SampledStatistics))


class ShardedReadout(TilesReadout):
    """See `Readout`. Ranks exchange logits only for requests that need whole rows of them."""

    def _likeliest(self, hidden: torch.Tensor, entropy: bool) -> RowStatistics:
        """Statistics ``[rows]`` of the likeliest tokens."""
        return sharded_statistics(
            hidden, self.tiles, self.mask_token, entropy, HEAD_BYTES, self.compile
        )

    def _drawn(self, hidden: torch.Tensor, request: ReadRequest) -> Readings:
        """Readings with drawn tokens.

        They take a second pass over the head, which costs less than exchanging logits.
        """
        greedy = self._likeliest(hidden, request.entropy)
        temperature = request.temperature.repeat_interleave(self.slots.length)
        keys, budget = self.keys_of(request.slots), tile_budget(self.slots.device)
        sampled = self._sampled(hidden, temperature, keys, budget)
        weight = sampled.sample_probability / sampled.probability
        length = self.slots.length
        own = request.own_confidence_rows(length)
        statistics = with_drawn(greedy, weight, temperature > 0, sampled.sample, own)
        logprob = None
        if request.logprob:
            logprob = drawn_logprob(greedy, weight, temperature).view(-1, length)
        return Readings(statistics.view(-1, length), logprob=logprob)

    def _sampled(
        self, hidden: torch.Tensor, temperature: torch.Tensor, keys: torch.Tensor, budget: int
    ) -> SampledStatistics:
        head = without(self.tiles, self.mask_token)
        return tiled_statistics(hidden, head, temperature, keys, budget, self.compile)[0]

    def warm_up(self, hidden: torch.Tensor) -> None:
        """See `Readout`."""
        super().warm_up(hidden)
        rows, device = len(hidden), hidden.device
        self._likeliest(hidden, entropy=False)
        temperature, keys = torch.ones(rows, device=device), torch.arange(rows, device=device)
        budgets = batch_extremes(self.slots), self.tiles, tile_budget(self.slots.device)
        for budget in example_budgets(rows, *budgets):
            self._sampled(hidden, temperature, keys, budget)


class TiledReadout:
    """See `Readout`. The logits of a whole batch never exist together.

    Requests that need whole rows take a second pass over the head, one canvas at a time.

    Attributes:
        head: the head, with the embedding of the soft embedding.
        head_alone: the same head without the embedding, for batches in which no canvas goes on.
        tile_bytes: how many bytes a tile's temporaries may use.
        statistics: a function like `tiled_statistics`.
        noise: `step_noise`, compiled or not.
    """

    canvases = 1

    def __init__(
        self, head: Head, slots: SlotState, parts: OptionalParts, compile: bool = False
    ) -> None:
        self.head = head
        self.head_alone = replace(head, embedding=None)
        self.slots = slots
        self.parts = parts
        self.tile_bytes = tile_budget(slots.device)
        self.statistics: Callable[..., Result] = partial(tiled_statistics, compile=compile)
        self.noise = compiled(step_noise) if compile else step_noise

    @cached_property
    def pipeline(self) -> LogitsPipeline[NoiseRows]:
        """The pipeline that chooses tokens from whole rows of logits."""
        from vllm_dllm.engine.token_choice import LogitsPipeline, NoiseChoice

        return LogitsPipeline(self.parts, NoiseChoice(self.parts))

    def read(self, hidden: torch.Tensor, request: ReadRequest) -> Readings:
        """See `Readout`."""
        length, count = self.slots.length, len(request.slots)
        counters = Counters.of_canvases(self.slots, request.slots)
        drawn = self.noise(counters, self.head.vocabulary)
        keys = drawn.keys.view(count, length)
        temperature = request.temperature.repeat_interleave(length)
        head = self.head if request.may_go_on else self.head_alone
        statistics, soft = self.statistics(hidden, head, temperature, keys, self.tile_bytes)
        all_full = isinstance(request.width, int)
        readings = Readings(
            statistics,
            noise=drawn.renoise.view(count, length),
            next_canvas=drawn.fresh.view(count, length) if all_full else None,
            soft_embedding=None if soft is None else soft.view(count, length, -1),
        )
        if request.needs_rows or request.constraint is not None:
            self._read_whole_rows(readings, hidden, request, keys)
        return readings

    def _read_whole_rows(
        self, readings: Readings, hidden: torch.Tensor, request: ReadRequest, keys: torch.Tensor
    ) -> None:
        """Overwrite the readings of canvases that need whole rows of logits."""
        state, length = self.slots, self.slots.length
        soft = readings.soft_embedding
        assert readings.noise is not None
        needs = state.needs_rows[request.on_host] | state.constrained[request.on_host]
        for index in np.flatnonzero(needs).tolist():
            logits = self.head.whole(hidden[index * length : (index + 1) * length])
            own_request = request.part(index, index + 1)
            own = slice(index, index + 1)
            chosen = self.pipeline.read(logits, own_request, keys[own], readings.noise[own])
            for name in _FIELDS:
                getattr(readings.statistics, name)[index] = getattr(chosen.statistics, name)
            if soft is not None:
                soft[index] = average(self.head, chosen.distribution)
            del logits, chosen  # the rows of one canvas at a time

    def warm_up(self, hidden: torch.Tensor) -> None:
        """See `Readout`."""
        device, rows = hidden.device, len(hidden)
        counters = Counters.of_canvases(self.slots, torch.tensor([0], device=device))
        self.noise(counters, self.head.vocabulary)
        temperature, keys = torch.zeros(rows, device=device), torch.arange(rows, device=device)
        for budget in example_budgets(rows, batch_extremes(self.slots), self.head, self.tile_bytes):
            self.statistics(hidden, self.head, temperature, keys, budget)
