"""The choice of a masked model's tokens from rows of logits: bias, filter, draw, report.

This module is loaded for the first batch in which a request draws or needs whole rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from vllm_dllm.engine.contracts import MaskedRows, Readings, StepPlan
from vllm_dllm.engine.optional_parts import OptionalParts
from vllm_dllm.engine.slots import SlotState
from vllm_dllm.ops.compiled import CompiledOnce, compiled
from vllm_dllm.ops.noise.keyed import Counters, candidate_keys
from vllm_dllm.ops.statistics.row_changes import RowChanges
from vllm_dllm.ops.statistics.rows import (
    RankedTokens,
    RowStatistics,
    SampledStatistics,
    ranked_tokens,
)
from vllm_dllm.ops.statistics.sampled import (
    draw,
    drawn_logprob,
    drawn_weight,
    with_drawn,
)

# Maps (logits [rows, vocabulary], forbidden id, entropy) to statistics [rows], like
# `row_statistics`.
StatisticsOfRows = Callable[[torch.Tensor, int, bool], RowStatistics]
# Maps hidden states [rows, hidden] to logits [rows, vocabulary].
Head = Callable[[torch.Tensor], torch.Tensor]


class MaskedPipeline:
    """Chooses the likeliest token other than the mask, or a drawn one, from rows of logits."""

    def __init__(
        self, parts: OptionalParts, mask_token: int, statistics: StatisticsOfRows, compile: bool
    ) -> None:
        """Choose with `statistics`, and draw with (maybe compiled) operators."""
        self.slots = parts.slots
        self.parts = parts
        self.mask_token = mask_token
        self.statistics = statistics
        self.draw = CompiledOnce(draw) if compile else draw
        self.keys = compiled(candidate_keys) if compile else candidate_keys

    def readings(self, head: Head, hidden: torch.Tensor, plan: StepPlan, canvases: int) -> Readings:
        """Read whole rows of logits of `canvases` canvases at a time; see `Readout.read`."""
        length, count = self.slots.length, len(plan.slots)
        statistics, logprob, asked, ranked = [], [], [], []
        changes = self.parts.rows.changes(plan) if plan.needs_rows else None
        # What is copied before it is changed, or divided by temperatures, takes more memory.
        copies = 1 + (changes is not None) + 2 * (plan.constraint is not None and plan.draws)
        at_once = max(1, canvases // copies)
        for first in range(0, count, at_once):
            end = min(first + at_once, count)
            part, own = plan.part(first, end), hidden[first * length : end * length]
            part.rows = self._rows_of(part)
            logits = head(own if part.rows is None else own.index_select(0, part.rows))
            keys = self._keys_of(part.slots) if plan.draws else None
            of_part = None if changes is None else changes.part(slice(first, end))
            chosen = self.read(logits, part, keys, changes=of_part)
            statistics.append(chosen.statistics)
            if chosen.logprob is not None:
                logprob.append(chosen.logprob)
            if part.ask is not None:
                ids = part.ask.flatten(0, 1)  # [rows, K]
                total = chosen.logits.float().logsumexp(-1, keepdim=True)
                asked.append(chosen.logits.gather(1, ids).float() - total)
            if part.batch.likeliest:
                ranked.append(ranked_tokens(chosen.logits, self.mask_token, part.batch.likeliest))
            del logits, chosen  # the rows of one part at a time
        joined = type(statistics[0]).join(statistics).view(-1, length)
        return Readings(
            joined,
            log_probabilities=torch.cat(asked).view(count, length, -1) if asked else None,
            logprob=torch.cat(logprob).view(-1, length) if logprob else None,
            likeliest=RankedTokens.join(ranked).view(count, length) if ranked else None,
        )

    def _rows_of(self, plan: StepPlan) -> torch.Tensor | None:
        """See `StepPlan.rows`."""
        whole = plan.adjust is not None or plan.reads_logits or plan.needs_logprob
        if whole or self.slots.needs_rows[plan.on_host].any():
            return None
        return plan.masked_rows()

    def _keys_of(self, slots: torch.Tensor) -> torch.Tensor:
        """Keys of the random numbers of all positions of ``slots`` (int64 ``[n]``): ``[n, L]``."""
        return self.keys(Counters.of_canvases(self.slots, slots)).view(-1, self.slots.length)

    def warm_up(self, logits: torch.Tensor) -> None:
        """Call the functions that choose and draw, see `Readout.warm_up`."""
        self._keys_of(torch.tensor([0], device=logits.device))
        self.statistics(logits, self.mask_token, False)
        # Make it contiguous, as in a step: the head may return a view of a wider tensor.
        scaled = logits.float().contiguous()
        rows = torch.arange(len(logits), device=logits.device)
        self.draw(scaled, rows)

    def read(
        self,
        logits: torch.Tensor,
        plan: StepPlan,
        keys: torch.Tensor | None,
        changes: RowChanges | None = None,
    ) -> MaskedRows:
        """Choose the tokens of the ``n`` canvases of a plan from logits ``[n * L, vocabulary]``.

        The keys of the random numbers (int64 ``[n, L]``) are None if no request draws. Logits in
        float32 may be overwritten; `changes` are the biases.
        """
        logits = self.adjusted(logits, plan)
        chosen = self.choose(logits, plan, keys, changes)
        if plan.constraint is not None:
            plan.constraint.choose_paths(chosen, plan)
        if self.slots.reports[plan.on_host].any():
            samples = self.slots.samples[plan.on_host]

            def scores_of(index: int, positions: slice) -> torch.Tensor:
                """What a canvas' logprobs come from, ``[positions, vocabulary]``."""
                drawn = chosen.filtered if samples[index] else None
                rows = chosen.logits if drawn is None else drawn
                if self.parts.logprobs.of_raw_logits:
                    rows = logits
                return rows.unflatten(0, (-1, self.slots.length))[index, positions]

            found = candidates(self.slots, chosen.statistics, plan)
            self.parts.logprobs.capture(plan.on_host, scores_of, found)
        return chosen

    def adjusted(self, logits: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        """The logits after the algorithms' own changes, see `Algorithm.adjust`."""
        if plan.adjust is None:
            return logits
        ids, amount = (part.reshape(-1, 1) for part in plan.adjust)
        return logits.float().scatter_add_(1, ids, amount)

    def choose(
        self,
        logits: torch.Tensor,
        plan: StepPlan,
        keys: torch.Tensor | None,
        changes: RowChanges | None,
    ) -> MaskedRows:
        """Bias and filter rows, and choose or draw tokens; arguments as for `read`.

        Filters apply after the temperature.
        """
        chosen = self._choose(biased(logits, changes), plan, keys)
        if plan.rows is None:
            return chosen
        count, share = len(plan.slots) * self.slots.length, chosen.share
        if share is not None:
            share = share.new_zeros(count).index_copy_(0, plan.rows, share)
        place = torch.full((count,), -1).index_copy_(0, plan.rows, torch.arange(len(plan.rows)))
        return replace(
            chosen,
            statistics=chosen.statistics.spread(plan.rows, count),
            greedy=chosen.greedy.spread(plan.rows, count),
            share=share,
            place=place.view(-1, self.slots.length),
        )

    def _choose(
        self, logits: torch.Tensor, plan: StepPlan, keys: torch.Tensor | None
    ) -> MaskedRows:
        """`choose` in the rows that are read."""
        samples = self.slots.samples[plan.on_host]
        greedy = self.statistics(logits, self.mask_token, plan.batch.entropy)
        logprob = greedy.probability.log() if plan.needs_logprob else None
        if keys is None or not samples.any():
            return MaskedRows(greedy, greedy, logits, logprob)
        temperature, flat = self._per_row(plan.temperature, plan), keys.flatten()
        if plan.rows is not None:
            flat = flat.index_select(0, plan.rows)
        draws = temperature > 0
        constrained = self.slots.constrained[plan.on_host]
        tempered = logits.float() / torch.where(draws, temperature, 1.0)[:, None]
        tempered[:, self.mask_token].fill_(-torch.inf)
        kept = self.parts.rows.filtered(tempered, plan) if plan.needs_rows else tempered
        chosen, share = greedy, self._share(greedy.token, tempered, kept)
        # Constrained canvases draw later, when they follow their paths.
        if (samples & ~constrained).any():
            drawn = self.draw(kept, flat)
            weight = drawn_weight(greedy, tempered, drawn)
            chosen, logprob = self._drawn(greedy, plan, temperature, draws, drawn, weight, share)
        return MaskedRows(chosen, greedy, logits, logprob, tempered, kept, keys, share)

    def _share(
        self, likeliest: torch.Tensor, tempered: torch.Tensor, kept: torch.Tensor
    ) -> torch.Tensor | None:
        """The argmax' probabilities by `Family.draw_confidence`, see `with_drawn`; or None."""
        asked = self.slots.kind.draw_confidence
        if asked is None:
            return None
        rows = kept if asked == "filtered" else tempered
        return (rows.gather(1, likeliest[:, None])[:, 0] - rows.logsumexp(-1)).exp()

    def _per_row(self, values: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        """The temperatures ``[n]`` of canvases for each row that is read.

        The token that a commit predicts for the next canvas (`ShiftedReadout`) is never drawn.
        """
        rows = values.repeat_interleave(self.slots.length)
        if self.slots.kind.shifted:
            rows.view(-1, self.slots.length)[:, 0] = 0
        return rows if plan.rows is None else rows.index_select(0, plan.rows)

    def _drawn(
        self,
        greedy: RowStatistics,
        plan: StepPlan,
        temperature: torch.Tensor,
        draws: torch.Tensor,
        drawn: torch.Tensor,
        weight: torch.Tensor,
        share: torch.Tensor | None = None,
    ) -> tuple[RowStatistics, torch.Tensor | None]:
        """The statistics with drawn tokens, and `Readings.logprob`; tensors are ``[rows]``.

        For `share` see `with_drawn`.
        """
        own = plan.own_confidence
        if own is not None:
            own = self._per_row(own, plan)
        chosen = with_drawn(greedy, weight, draws, drawn, own, share)
        logprob = drawn_logprob(greedy, weight, temperature) if plan.needs_logprob else None
        return chosen, logprob


def candidates(
    slots: SlotState, statistics: RowStatistics, plan: StepPlan, noise: torch.Tensor | None = None
) -> torch.Tensor:
    """The tokens that canvases may hold after `Algorithm.step`, int64 ``[n, L, C]``.

    `noise` are random tokens (int64 ``[n, L]``) that an algorithm of uniform noise may choose.
    """
    # An id of the tokenizer may lie outside the head, but only in a prompt.
    held = slots.tokens.index_select(0, plan.slots).clamp_max(slots.kind.vocabulary - 1)
    parts = [statistics.token.view_as(held), held]
    if isinstance(statistics, SampledStatistics):
        parts.append(statistics.sample.view_as(held))
    if noise is not None:
        parts.append(noise)
    found = torch.stack(parts, -1)
    return found if plan.ask is None else torch.cat([found, plan.ask], -1)


def biased(logits: torch.Tensor, changes: RowChanges | None) -> torch.Tensor:
    """A changed copy of logits ``[rows, vocabulary]`` in float32, or they if nothing changes."""
    if changes is None or (changes.on_host < 0).all():  # nobody's in this part of the batch
        return logits
    scores = logits.to(torch.float32, copy=True)
    changes.apply(scores)
    return scores
