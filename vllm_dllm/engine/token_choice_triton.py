"""The choice of tokens by Triton kernels, which read rows of logits in the head's dtype.

Biases, penalties and filters are applied as the rows are read. Scores are written to memory only
where a constraint, an algorithm or a report reads them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from vllm_dllm.engine.contracts import MaskedRows, Readings, StepPlan
from vllm_dllm.engine.optional_parts import OptionalParts
from vllm_dllm.engine.readout_noise import NoiseReadout
from vllm_dllm.engine.slots import SlotState
from vllm_dllm.engine.token_choice import MaskedPipeline, log_divisor
from vllm_dllm.ops.compiled import compiled
from vllm_dllm.ops.noise.keyed import Counters
from vllm_dllm.ops.statistics.filters_triton import read_with
from vllm_dllm.ops.statistics.head import Head
from vllm_dllm.ops.statistics.partials import SoftmaxPartials
from vllm_dllm.ops.statistics.row_changes import RowChanges
from vllm_dllm.ops.statistics.rows import SampledStatistics
from vllm_dllm.ops.statistics.rows_triton import MaskedKernels, logits_statistics
from vllm_dllm.ops.statistics.scores_triton import LogitRows
from vllm_dllm.ops.statistics.soft_embedding_triton import soft_embedding

# How many bytes the logits and soft embeddings of a uniform-noise model may take at a time, which
# is 17 canvases of DiffusionGemma. Every part of a batch launches kernels of its own.
ROWS_BYTES = 9 << 28


class MaskedKernelPipeline(MaskedPipeline):
    """Chooses the likeliest token other than the mask, or a drawn one, by kernels."""

    def adjusted(self, logits: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        """See `LogitsPipeline`: kernels do it, unless the logits are reported."""
        reports = self.slots.reports[plan.on_host].any()
        return super().adjusted(logits, plan) if reports else logits

    def choose(
        self,
        logits: torch.Tensor,
        plan: StepPlan,
        keys: torch.Tensor | None,
        changes: RowChanges | None,
    ) -> MaskedRows:
        """See `LogitsPipeline`. Filters apply after the temperature."""
        on_host, mask, added = plan.on_host, self.mask_token, None
        reports = self.slots.reports[on_host].any()
        if plan.adjust is not None and not reports:
            added = plan.adjust[0].flatten(), plan.adjust[1].flatten()
        plain = LogitRows(logits, self.slots.length, added=added)
        rows = read_with(plain, changes, None)
        greedy = MaskedKernels.from_logits(rows, mask, plan.batch.entropy)
        logprob = greedy.probability.log() if plan.needs_logprob else None
        reports_scores = reports and not self.reports_raw
        needs_scores = plan.constraint is not None or plan.reads_logits or reports_scores
        is_same = changes is None and added is None
        scores = rows.whole() if needs_scores and not is_same else logits
        samples, constrained = self.slots.samples[on_host], self.slots.constrained[on_host]
        if keys is None or not samples.any():
            return MaskedRows(greedy, greedy, scores, samples, logprob)
        temperature, chosen = self._per_row(plan.temperature, plan), greedy
        draws = temperature > 0
        filters = self.parts.rows.filters(plan) if plan.needs_rows else None
        if filters is not None:
            rows = read_with(plain, changes, filters, temperature, mask)
        # Constrained canvases draw later, when they follow their paths.
        if (samples & ~constrained).any():
            drawn, weight = MaskedKernels.drawn(rows, temperature, keys.flatten(), mask)
            chosen, logprob = self._drawn(greedy, plan, temperature, draws, drawn, weight)
        if not (reports_scores or constrained.any()):
            return MaskedRows(chosen, greedy, scores, samples, logprob)
        tempered = scores.float() / torch.where(draws, temperature, 1.0)[:, None]
        tempered[:, mask].fill_(-torch.inf)
        kept = tempered
        if filters is not None and rows.floor is not None:
            kept = tempered.masked_fill(scores < rows.floor[:, None], -torch.inf)
        return MaskedRows(chosen, greedy, scores, samples, logprob, tempered, kept, keys)

    def warm_up(self, logits: torch.Tensor) -> None:
        """Compile every form of the kernels."""
        device, length = logits.device, self.slots.length
        keys = self._keys_of(torch.zeros(len(logits) // length, dtype=torch.int64, device=device))
        temperature, amounts = torch.ones((2, keys.numel()), device=device)
        logits = logits[: keys.numel()]
        added = (torch.zeros_like(keys).flatten(), amounts), None
        for plain in (LogitRows(logits, length, added=each) for each in added):
            for rows in every_form(plain, temperature):
                MaskedKernels.from_logits(rows, self.mask_token, entropy=False)
                MaskedKernels.drawn(rows, temperature, keys.flatten(), self.mask_token)
        # What constrained canvases are drawn from.
        logits_statistics(LogitRows(logits.float(), length), keys=keys.flatten())


def every_form(plain: LogitRows, temperature: torch.Tensor | None) -> Iterator[LogitRows]:
    """Rows as kernels read them: without options and with them.

    Filters at this temperature, and scores in memory, are computed on the way.
    """
    count, device = -(-len(plain.logits) // plain.length), plain.logits.device
    zero = torch.zeros(count, device=device)
    filters = zero, torch.zeros(count, dtype=torch.int64, device=device), zero
    for rows in plain, read_with(plain, None, filters, temperature):
        rows.whole()
        yield rows


class NoiseKernelReadout(NoiseReadout):
    """See `Readout`: the head is multiplied once a step, for as many canvases as memory allows."""

    triton = True

    def __init__(
        self, head: Head, slots: SlotState, parts: OptionalParts, compile: bool = False
    ) -> None:
        super().__init__(head, slots, parts, compile)
        assert head.weight is not None
        width = head.vocabulary if head.shard is None else head.shard.width
        bytes_of_row = width * head.weight.element_size() + 8 * head.weight.shape[1]
        self.canvases = max(1, ROWS_BYTES // (slots.length * bytes_of_row))
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
        is_whole = head.shard is not None and (plan.needs_rows or plan.constraint is not None)
        logits = head.whole(hidden) if is_whole else head.products(hidden)
        filters = self.parts.rows.filters(plan) if plan.needs_rows else None
        rows = LogitRows(logits, length, None if is_whole else head.soft_cap)
        rows = read_with(rows, changes, filters)
        temperature = plan.temperature.repeat_interleave(length)
        first_id = 0 if is_whole else head.ids.start
        partials = logits_statistics(rows, None, temperature, keys.flatten(), first_id)
        if not is_whole:
            partials = partials.merge_ranks(head.shard)
        statistics = self.finish(partials, temperature).view(count, length)
        if plan.constraint is not None:
            follow = np.flatnonzero(self.slots.constrained[plan.on_host])

            def scores(first: int, end: int) -> torch.Tensor:
                return rows.part(slice(first, end)).whole().unflatten(0, (-1, length))

            at_once = max(1, ROWS_BYTES // (4 * length * head.vocabulary))
            statistics = plan.constraint.choose_noise_paths(
                statistics, plan, follow, keys, scores, at_once
            )
        if self.slots.reports[plan.on_host].any():
            divisor = log_divisor(self.slots, plan)

            def scores_of(index: int, positions: slice) -> torch.Tensor:
                return rows.part(slice(index, index + 1)).whole()[positions] / divisor[index]

            candidates = self.pipeline.candidates(statistics, plan, noise)
            self.parts.logprobs.capture(plan.on_host, scores_of, candidates)
        if not plan.may_go_on or head.embedding is None:
            return statistics, None
        soft = soft_embedding(rows, head, temperature, partials)
        return statistics, soft.view(count, length, -1)

    def warm_up(self, hidden: torch.Tensor) -> None:
        """See `Readout`."""
        head, device = self.head, hidden.device
        slot = torch.zeros(1, dtype=torch.int64, device=device)
        self.noise(Counters.of_canvases(self.slots, slot), head.vocabulary)
        temperature = torch.ones(len(hidden), device=device)
        keys = torch.zeros(len(hidden), dtype=torch.int64, device=device)
        forms = [LogitRows(head.products(hidden), self.slots.length, head.soft_cap)]
        if head.shard is not None:
            forms.append(LogitRows(head.whole(hidden), self.slots.length))
        for plain in forms:
            for rows in every_form(plain, None):
                partials = logits_statistics(rows, None, temperature, keys)
                self.finish(partials, temperature)
                if head.embedding is not None:
                    soft_embedding(rows, head, temperature, partials)


def _finished(partials: SoftmaxPartials, temperature: torch.Tensor) -> SampledStatistics:
    return partials.sampled_statistics(temperature == 0)
