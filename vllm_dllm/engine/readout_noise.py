"""The readout of a model of uniform noise, from rows of logits of some canvases at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from vllm_dllm.engine.contracts import Readings, StepPlan
from vllm_dllm.engine.optional_parts import OptionalParts
from vllm_dllm.engine.slots import SlotState
from vllm_dllm.ops.compiled import compiled
from vllm_dllm.ops.noise.keyed import Counters, step_noise
from vllm_dllm.ops.statistics.head import Head
from vllm_dllm.ops.statistics.partials import SoftmaxPartials
from vllm_dllm.ops.statistics.row_changes import RowChanges
from vllm_dllm.ops.statistics.rows import SampledStatistics, group_starts
from vllm_dllm.ops.statistics.sampled import sampled_partials, soft_embedding

# How many bytes the temporaries of some canvases may use, and what a logit takes: float32 logits,
# scaled ones, their distances to the largest, and weights.
ROWS_BYTES_CPU = 256 << 20
ROWS_BYTES_GPU = 1 << 30
LOGIT_BYTES = 16


class NoiseReadout:
    """See `Readout`; it also computes the soft embedding."""

    triton = False

    def __init__(
        self, head: Head, slots: SlotState, parts: OptionalParts, compile: bool = False
    ) -> None:
        self.head = head
        self.slots = slots
        self.parts = parts
        most = ROWS_BYTES_CPU if slots.device.type == "cpu" else ROWS_BYTES_GPU
        self.canvases = max(1, most // (LOGIT_BYTES * slots.length * head.vocabulary))
        self.scored_at_once = self.canvases  # of how many canvases `scores` are asked for
        self.noise = compiled(step_noise) if compile else step_noise
        self.pass_over = compiled(sampled_partials) if compile else sampled_partials
        self.finish = compiled(_finished) if compile else _finished

    def read(self, hidden: torch.Tensor, plan: StepPlan) -> Readings:
        """See `Readout`."""
        length, count = self.slots.length, len(plan.slots)
        drawn = self.noise(Counters.of_canvases(self.slots, plan.slots), self.head.vocabulary)
        keys, noise = drawn.keys.view(count, length), drawn.renoise.view(count, length)
        changes = self.parts.rows.changes(plan) if plan.needs_rows else None
        found = []
        for first in range(0, count, self.canvases):
            own = slice(first, min(first + self.canvases, count))
            part = plan if count <= self.canvases else plan.part(own.start, own.stop)
            of_part = None if changes is None else changes.part(own)
            rows = hidden[own.start * length : own.stop * length]
            found.append(self._read_part(rows, part, (keys[own], noise[own]), of_part))
        soft = [each for _, each in found if each is not None]
        all_full = isinstance(plan.width, int)
        return Readings(
            SampledStatistics.join([statistics for statistics, _ in found]),
            noise=noise,
            next_canvas=drawn.fresh.view(count, length) if all_full else None,
            soft_embedding=soft[0] if len(soft) == 1 else torch.cat(soft) if soft else None,
        )

    def _read_part(
        self,
        hidden: torch.Tensor,
        plan: StepPlan,
        drawn: tuple[torch.Tensor, torch.Tensor],
        changes: RowChanges | None,
    ) -> tuple[SampledStatistics, torch.Tensor | None]:
        """Statistics ``[n, L]`` and soft embeddings ``[n, L, hidden]`` of some canvases."""
        head, (keys, noise), (count, length) = self.head, drawn, drawn[0].shape
        # What ranks merge is not enough for what chooses among the ids of all of them.
        is_whole = head.shard is None or plan.needs_rows or plan.constraint is not None
        rows = self.rows(hidden, plan, changes, is_whole)
        temperature = plan.temperature.repeat_interleave(length)
        first_id = 0 if is_whole else head.ids.start
        own, weights = self.partials(rows, temperature, keys.flatten(), first_id)
        merged = own if is_whole else own.merge_ranks(head.shard)
        statistics = self.finish(merged, temperature).view(count, length)
        if plan.constraint is not None:
            statistics = plan.constraint.choose_noise_paths(
                statistics, plan, keys,
                lambda first, end: self.scores(rows, slice(first, end)), self.scored_at_once,
            )  # fmt: skip
        if self.slots.reports[plan.on_host].any():
            self._report(rows, statistics, plan, noise)
        if not plan.batch.flags["several_steps"] or head.embedding is None:  # none goes on
            return statistics, None
        soft = self.soft(weights, temperature, own, merged)
        return statistics, soft.view(count, length, -1)

    def _report(
        self, rows: Any, statistics: SampledStatistics, plan: StepPlan, noise: torch.Tensor
    ) -> None:
        """Keep what logprobs are made of, at the temperature of the step."""
        from vllm_dllm.engine.token_choice import candidates

        plain = self.slots.read_only.index_select(0, plan.slots) | (plan.temperature == 0)
        divisor = torch.where(plain, 1.0, plan.temperature)
        self.capture(plan, rows, divisor, candidates(self.slots, statistics, plan, noise))

    def capture(
        self, plan: StepPlan, rows: Any, divisor: torch.Tensor, candidates: torch.Tensor
    ) -> None:
        """See `LogprobReports.capture`; scores are divided by `divisor`, float32 ``[n]``."""

        def scores_of(index: int, positions: slice) -> torch.Tensor:
            return self.scores(rows, slice(index, index + 1))[0, positions] / divisor[index]

        self.parts.logprobs.capture(plan.on_host, scores_of, candidates)

    def rows(
        self, hidden: torch.Tensor, plan: StepPlan, changes: RowChanges | None, is_whole: bool
    ) -> Any:
        """The rows of canvases, of the ids of all ranks or of this rank's, with their options.

        Filters apply before the temperature.
        """
        logits = self.head.logits(hidden)
        if is_whole:
            logits = self.head.of_all_ranks(logits)
        if changes is not None:
            changes.apply(logits)
        return self.parts.rows.filtered(logits, plan) if plan.needs_rows else logits

    def partials(
        self, rows: Any, temperature: torch.Tensor, keys: torch.Tensor, first_id: int
    ) -> tuple[SoftmaxPartials, Any]:
        """The results of one pass over the rows, and what `soft` takes."""
        if not rows.shape[1]:
            return SoftmaxPartials.empty(len(rows), rows.device), rows
        starts = group_starts(first_id, first_id + rows.shape[1], keys.device)
        return self.pass_over(rows, temperature, keys, starts)

    def scores(self, rows: Any, canvases: slice) -> torch.Tensor:
        """The scores of some canvases, float32 ``[canvases, L, vocabulary]``."""
        own: torch.Tensor = rows.unflatten(0, (-1, self.slots.length))[canvases]
        return own

    def soft(
        self,
        weights: Any,
        temperature: torch.Tensor,
        own: SoftmaxPartials,
        merged: SoftmaxPartials,
    ) -> torch.Tensor:
        """The soft embedding; the arguments are those of `sampled.soft_embedding`."""
        return soft_embedding(weights, self.head, temperature, own, merged)

    def warm_up(self, hidden: torch.Tensor) -> None:
        """See `Readout`."""
        head, device = self.head, hidden.device
        slot = torch.zeros(1, dtype=torch.int64, device=device)
        self.noise(Counters.of_canvases(self.slots, slot), head.vocabulary)
        temperature = torch.ones(len(hidden), device=device)
        keys = torch.zeros(len(hidden), dtype=torch.int64, device=device)
        for rows in self.examples(hidden):
            found, weights = self.partials(rows, temperature, keys, head.ids.start)
            self.finish(found, temperature)
            if head.embedding is not None:
                self.soft(weights, temperature, found, found)

    def examples(self, hidden: torch.Tensor) -> Iterator[Any]:
        """Rows of every kind that a step reads."""
        logits = self.head.logits(hidden)
        yield logits
        if self.head.shard is not None:
            yield self.head.of_all_ranks(logits)


def _finished(partials: SoftmaxPartials, temperature: torch.Tensor) -> SampledStatistics:
    return partials.sampled_statistics(temperature == 0)
