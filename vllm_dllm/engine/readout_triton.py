"""Readouts by Triton kernels, which read rows of logits in the head's dtype.

Biases, penalties and filters are applied as the rows are read. Scores are written to memory only
where a constraint, an algorithm or a report reads them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from vllm_dllm.engine.contracts import MaskedRows, StepPlan
from vllm_dllm.engine.logprobs import ScoreSummary
from vllm_dllm.engine.optional_parts import OptionalParts
from vllm_dllm.engine.readout_noise import NoiseReadout
from vllm_dllm.engine.slots import SlotState
from vllm_dllm.engine.token_choice import MaskedPipeline
from vllm_dllm.ops.statistics.filters_triton import read_with
from vllm_dllm.ops.statistics.head import Head
from vllm_dllm.ops.statistics.partials import SoftmaxPartials
from vllm_dllm.ops.statistics.row_changes import RowChanges
from vllm_dllm.ops.statistics.rows_triton import drawn_by_kernels, logits_statistics
from vllm_dllm.ops.statistics.scores_triton import LogitRows, report
from vllm_dllm.ops.statistics.soft_embedding_triton import soft_embedding

# How many bytes the logits and soft embeddings of a uniform-noise model may take at a time, which
# is 17 canvases of DiffusionGemma. Every part of a batch launches kernels of its own.
ROWS_BYTES = 9 << 28


class MaskedKernelPipeline(MaskedPipeline):
    """Chooses the likeliest token other than the mask, or a drawn one, by kernels."""

    def adjusted(self, logits: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        """See `MaskedPipeline`: kernels do it, unless the logits are reported."""
        reports = self.slots.reports[plan.on_host].any()
        return super().adjusted(logits, plan) if reports else logits

    def choose(
        self,
        logits: torch.Tensor,
        plan: StepPlan,
        keys: torch.Tensor | None,
        changes: RowChanges | None,
    ) -> MaskedRows:
        """See `MaskedPipeline`. Filters apply after the temperature."""
        on_host, mask, added = plan.on_host, self.mask_token, None
        reports = self.slots.reports[on_host].any()
        if plan.adjust is not None and not reports:
            added = plan.adjust[0].flatten(), plan.adjust[1].flatten()
        plain = LogitRows(logits, self.slots.length, added=added)
        rows = read_with(plain, changes, None)
        greedy = logits_statistics(rows, mask).greedy_statistics(plan.batch.entropy)
        logprob = greedy.probability.log() if plan.needs_logprob else None
        reports_scores = reports and not self.parts.logprobs.of_raw_logits
        needs_scores = plan.constraint is not None or plan.reads_logits or reports_scores
        is_same = changes is None and added is None
        scores = rows.whole() if needs_scores and not is_same else logits
        samples, constrained = self.slots.samples[on_host], self.slots.constrained[on_host]
        if keys is None or not samples.any():
            return MaskedRows(greedy, greedy, scores, logprob)
        temperature, chosen = self._per_row(plan.temperature, plan), greedy
        draws = temperature > 0
        filters = self.parts.rows.filters(plan) if plan.needs_rows else None
        if filters is not None:
            rows = read_with(plain, changes, filters, temperature, mask)
        # Constrained canvases draw later, when they follow their paths.
        if (samples & ~constrained).any():
            drawn, weight = drawn_by_kernels(rows, temperature, keys.flatten(), mask)
            chosen, logprob = self._drawn(greedy, plan, temperature, draws, drawn, weight)
        if not (reports_scores or constrained.any()):
            return MaskedRows(chosen, greedy, scores, logprob)
        tempered = scores.float() / torch.where(draws, temperature, 1.0)[:, None]
        tempered[:, mask].fill_(-torch.inf)
        kept = tempered
        if filters is not None and rows.floor is not None:
            kept = tempered.masked_fill(scores < rows.floor[:, None], -torch.inf)
        return MaskedRows(chosen, greedy, scores, logprob, tempered, kept, keys)

    def warm_up(self, logits: torch.Tensor) -> None:
        """Compile every form of the kernels."""
        device, length = logits.device, self.slots.length
        keys = self._keys_of(torch.zeros(len(logits) // length, dtype=torch.int64, device=device))
        temperature, amounts = torch.ones((2, keys.numel()), device=device)
        logits = logits[: keys.numel()]
        added = (torch.zeros_like(keys).flatten(), amounts), None
        for plain in (LogitRows(logits, length, added=each) for each in added):
            for rows in every_form(plain, temperature):
                logits_statistics(rows, self.mask_token)
                drawn_by_kernels(rows, temperature, keys.flatten(), self.mask_token)
        # What constrained canvases are drawn from.
        logits_statistics(LogitRows(logits.float(), length), keys=keys.flatten())


def every_form(plain: LogitRows, temperature: torch.Tensor | None) -> Iterator[LogitRows]:
    """Rows as kernels read them: without options and with them.

    Filters at this temperature, and scores in memory, are computed on the way.
    """
    count, device = -(-len(plain.logits) // plain.length), plain.logits.device
    zero = torch.zeros(count, device=device)
    filters = zero, torch.zeros(count, dtype=torch.int64, device=device), zero
    ids = torch.zeros((len(plain.logits), 4), dtype=torch.int64, device=device)
    for rows in plain, read_with(plain, None, filters, temperature):
        rows.whole()
        report(rows, zero + 1, ids, ids, normalizes=True)
        yield rows


class NoiseKernelReadout(NoiseReadout):
    """See `NoiseReadout`: the head is multiplied once for all of a part's canvases."""

    triton = True

    def __init__(
        self, head: Head, slots: SlotState, parts: OptionalParts, compile: bool = False
    ) -> None:
        super().__init__(head, slots, parts, compile)
        assert head.weight is not None
        width = head.vocabulary if head.shard is None else head.shard.width
        bytes_of_row = width * head.weight.element_size() + 8 * head.weight.shape[1]
        self.canvases = max(1, ROWS_BYTES // (slots.length * bytes_of_row))
        self.scored_at_once = max(1, ROWS_BYTES // (4 * slots.length * head.vocabulary))

    def rows(
        self, hidden: torch.Tensor, plan: StepPlan, changes: RowChanges | None, is_whole: bool
    ) -> LogitRows:
        """See `NoiseReadout`; the logits have the head's dtype, unless ranks exchange them."""
        filters = self.parts.rows.filters(plan) if plan.needs_rows else None
        return read_with(self._plain(hidden, is_whole), changes, filters)

    def _plain(self, hidden: torch.Tensor, is_whole: bool) -> LogitRows:
        head, length = self.head, self.slots.length
        if is_whole and head.shard is not None:
            return LogitRows(head.of_all_ranks(head.logits(hidden)), length)
        return LogitRows(head.products(hidden), length, head.soft_cap)

    def partials(
        self, rows: LogitRows, temperature: torch.Tensor, keys: torch.Tensor, first_id: int
    ) -> tuple[SoftmaxPartials, LogitRows]:
        """See `NoiseReadout`."""
        return logits_statistics(rows, None, temperature, keys, first_id), rows

    def scores(self, rows: LogitRows, canvases: slice) -> torch.Tensor:
        """See `NoiseReadout`."""
        return rows.part(canvases).whole().unflatten(0, (-1, self.slots.length))

    def soft(
        self,
        weights: LogitRows,
        temperature: torch.Tensor,
        own: SoftmaxPartials,
        merged: SoftmaxPartials,
    ) -> torch.Tensor:
        """See `NoiseReadout`."""
        return soft_embedding(weights, self.head, temperature, merged)

    def capture(
        self, plan: StepPlan, rows: LogitRows, divisor: torch.Tensor, candidates: torch.Tensor
    ) -> None:
        """See `NoiseReadout`."""
        count, length, of_rows = *candidates.shape[:2], candidates.flatten(0, 1)

        def likeliest(most: int) -> torch.Tensor:
            if rows.changes is None:  # the soft cap keeps the order
                return rows.logits.topk(most, -1).indices
            firsts = range(0, count, self.scored_at_once)
            some = (rows.part(slice(i, min(i + self.scored_at_once, count))) for i in firsts)
            return torch.cat([part.whole().topk(most, -1).indices for part in some])

        def summarized(asked: int | torch.Tensor, normalizes: bool) -> ScoreSummary:
            ids = likeliest(asked) if isinstance(asked, int) else asked.expand(len(of_rows), -1)
            scores, own, ranks = report(rows, divisor, ids, of_rows, normalizes)
            columns = ids.int(), scores, of_rows, own, ranks
            return ScoreSummary(*(column.unflatten(0, (count, length)) for column in columns))

        self.parts.logprobs.capture(plan.on_host, None, candidates, summarized)

    def examples(self, hidden: torch.Tensor) -> Iterator[LogitRows]:
        """See `NoiseReadout`."""
        yield from every_form(self._plain(hidden, is_whole=False), None)
        if self.head.shard is not None:
            yield from every_form(self._plain(hidden, is_whole=True), None)
