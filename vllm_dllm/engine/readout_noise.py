"""The readout of a model of uniform noise, over tiles of the head.

The logits of a whole batch never exist together. Requests that need whole rows take a second pass
over the head, one canvas at a time.
"""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_dllm.engine.contracts import Readings, StepPlan
from vllm_dllm.engine.optional_parts import OptionalParts
from vllm_dllm.engine.slots import SlotState
from vllm_dllm.ops.compiled import compiled
from vllm_dllm.ops.noise.keyed import Counters, step_noise
from vllm_dllm.ops.statistics.head import Head
from vllm_dllm.ops.statistics.rows import SampledStatistics
from vllm_dllm.ops.statistics.tiled import average, example_budgets, tiled_statistics

if TYPE_CHECKING:
    from vllm_dllm.engine.token_choice import NoisePipeline

# How many bytes a tile's temporaries may use. A small tile stays in a CPU's caches. On a GPU each
# operator on a tile launches a kernel, so tiles are few and large.
TILE_BYTES_CPU = 32 << 20
TILE_BYTES_GPU = 1 << 30
# What a logit takes while whole rows are computed: a bfloat16 product, and float32.
WHOLE_BYTES = 6


class NoiseReadout:
    """See `Readout`; it also computes the soft embedding."""

    canvases = 1
    triton = False

    def __init__(
        self, head: Head, slots: SlotState, parts: OptionalParts, compile: bool = False
    ) -> None:
        self.head = head
        self.head_alone = replace(head, embedding=None)  # for batches in which no canvas goes on
        self.slots = slots
        self.parts = parts
        self.tile_bytes = TILE_BYTES_CPU if slots.device.type == "cpu" else TILE_BYTES_GPU
        self.statistics = partial(tiled_statistics, compile=compile)
        self.noise = compiled(step_noise) if compile else step_noise

    @cached_property
    def pipeline(self) -> NoisePipeline:
        """The pipeline that chooses tokens from whole rows of logits."""
        from vllm_dllm.engine.token_choice import NoisePipeline

        return NoisePipeline(self.parts)

    def read(self, hidden: torch.Tensor, plan: StepPlan) -> Readings:
        """See `Readout`."""
        length, count = self.slots.length, len(plan.slots)
        drawn = self.noise(Counters.of_canvases(self.slots, plan.slots), self.head.vocabulary)
        temperature = plan.temperature.repeat_interleave(length)
        head = self.head if plan.may_go_on else self.head_alone
        statistics, soft = self.statistics(hidden, head, temperature, drawn.keys, self.tile_bytes)
        all_full = isinstance(plan.width, int)
        readings = Readings(
            statistics.view(count, length),
            noise=drawn.renoise.view(count, length),
            next_canvas=drawn.fresh.view(count, length) if all_full else None,
            soft_embedding=None if soft is None else soft.view(count, length, -1),
        )
        if plan.needs_rows or plan.constraint is not None:
            self._read_whole_rows(readings, hidden, plan, drawn.keys.view(count, length))
        return readings

    def _read_whole_rows(
        self, readings: Readings, hidden: torch.Tensor, plan: StepPlan, keys: torch.Tensor
    ) -> None:
        """Overwrite the readings of canvases that need whole rows of logits.

        Those that only have a constraint keep all but their tokens.
        """
        state, length = self.slots, self.slots.length
        soft = readings.soft_embedding
        assert readings.noise is not None
        needs = state.needs_rows[plan.on_host]
        follow = np.flatnonzero(state.constrained[plan.on_host] & ~needs)
        if plan.constraint is not None and len(follow):
            assert isinstance(readings.statistics, SampledStatistics)

            def logits_of(first: int, end: int) -> torch.Tensor:
                rows = self.head.whole(hidden[first * length : end * length])
                return rows.unflatten(0, (-1, length))

            at_once = max(1, self.tile_bytes // (WHOLE_BYTES * length * self.head.vocabulary))
            readings.statistics = plan.constraint.choose_noise_paths(
                readings.statistics, plan, follow, keys, logits_of, at_once
            )
        for index in np.flatnonzero(needs).tolist():
            logits = self.head.whole(hidden[index * length : (index + 1) * length])
            own = slice(index, index + 1)
            one = plan.part(index, index + 1)
            changes = self.parts.rows.changes(one)
            chosen = self.pipeline.read(logits, one, keys[own], readings.noise[own], changes)
            for field in fields(SampledStatistics):
                getattr(readings.statistics, field.name)[index] = getattr(
                    chosen.statistics, field.name
                )
            if soft is not None:
                soft[index] = average(self.head, chosen.distribution)
            del logits, chosen  # the rows of one canvas at a time

    def warm_up(self, hidden: torch.Tensor) -> None:
        """See `Readout`."""
        device, rows, length = hidden.device, len(hidden), self.slots.length
        counters = Counters.of_canvases(self.slots, torch.tensor([0], device=device))
        self.noise(counters, self.head.vocabulary)
        temperature, keys = torch.zeros(rows, device=device), torch.arange(rows, device=device)
        smallest_and_largest = length, length * len(self.slots.tokens)
        for budget in example_budgets(rows, smallest_and_largest, self.head, self.tile_bytes):
            self.statistics(hidden, self.head, temperature, keys, budget)
