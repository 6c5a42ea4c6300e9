"""Readout of a model of uniform noise, over tiles of the vocabulary, with the soft embedding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial

import numpy as np
import torch

from vllm_dllm.engine.logits_pipeline import LogitsPipeline
from vllm_dllm.engine.logprobs import LogprobReports
from vllm_dllm.engine.readout.contract import (
    Readings,
    ReadRequest,
    batch_extremes,
    empty_path,
    tile_budget,
)
from vllm_dllm.engine.slots import SlotState
from vllm_dllm.engine.token_choice import NoiseChoice, NoiseRows
from vllm_dllm.ops.compiled import compiled
from vllm_dllm.ops.noise.keyed import Counters, step_noise
from vllm_dllm.ops.statistics.head import Head
from vllm_dllm.ops.statistics.partials import average
from vllm_dllm.ops.statistics.rows import SampledStatistics
from vllm_dllm.ops.statistics.tiled import Result, example_budgets, tiled_statistics

_FIELDS = tuple(f.name for f in fields(SampledStatistics))


class TiledReadout:
    """See `Readout`. The logits of a whole batch never exist together.

    Requests that need whole rows take a second pass over the head, one canvas at a time.

    Attributes:
        head: the head, with the embedding of the soft embedding.
        head_alone: the same head without it, for batches in which no canvas goes on.
        tile_bytes: how many bytes the temporaries of a tile may take.
        statistics: a function like `tiled_statistics`.
        noise: `step_noise`, compiled or not.
    """

    canvases = 1

    def __init__(
        self, head: Head, slots: SlotState, reports: LogprobReports, compile: bool = False
    ) -> None:
        self.head = head
        self.head_alone = replace(head, embedding=None)
        self.slots = slots
        self.tile_bytes = tile_budget(slots.device)
        self.statistics: Callable[..., Result] = partial(tiled_statistics, compile=compile)
        self.noise = compiled(step_noise) if compile else step_noise
        self.pipeline = LogitsPipeline(slots, head.vocabulary, NoiseChoice(slots), reports)

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
        if request.needs_rows or request.window is not None:
            self._read_whole_rows(readings, hidden, request, keys)
        return readings

    def _read_whole_rows(
        self, readings: Readings, hidden: torch.Tensor, request: ReadRequest, keys: torch.Tensor
    ) -> None:
        """Overwrite the readings of canvases that need whole rows of logits."""
        state, length = self.slots, self.slots.length
        if request.window is not None:
            readings.path = empty_path(request.window)
        soft = readings.soft_embedding
        assert readings.noise is not None
        needs = state.needs_rows[request.on_host] | state.constraints.constrained(request.on_host)
        for index in np.flatnonzero(needs).tolist():
            logits = self.head.whole(hidden[index * length : (index + 1) * length])
            own_request = request.part(index, index + 1)
            path = None if readings.path is None else readings.path.part(slice(index, index + 1))
            own = slice(index, index + 1)
            chosen = self.pipeline.read(logits, own_request, keys[own], path, readings.noise[own])
            assert isinstance(chosen, NoiseRows)
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
