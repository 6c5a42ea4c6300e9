"""The choice of tokens from whole rows of logits: bias, filter, draw, constrain, report.

This module is loaded for the first batch in which a request draws or needs whole rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
import torch

from vllm_dllm.engine.contracts import MaskedRows, NoiseRows, Readings, StepPlan
from vllm_dllm.engine.optional_parts import OptionalParts
from vllm_dllm.engine.row_options import RowOptions
from vllm_dllm.ops.compiled import CompiledOnce, compiled
from vllm_dllm.ops.noise.keyed import Counters, candidate_keys
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
    sampled_statistics,
    with_drawn,
)

if TYPE_CHECKING:
    from vllm_dllm.ops.statistics.rows_triton import MaskedKernels

# Maps (logits [rows, vocabulary], forbidden id, entropy) to statistics [rows], like
# `row_statistics`.
StatisticsOfRows = Callable[[torch.Tensor, int, bool], RowStatistics]
# Maps hidden states [rows, hidden] to logits [rows, vocabulary].
Head = Callable[[torch.Tensor], torch.Tensor]

Rows = TypeVar("Rows", MaskedRows, NoiseRows)


class LogitsPipeline(Generic[Rows]):
    """The one place where whole rows of logits are changed, chosen from and reported."""

    reports_raw: bool  # whether logprobs may come from raw logits

    def __init__(self, parts: OptionalParts) -> None:
        self.slots = parts.slots
        self.parts = parts

    def choose(self, logits: torch.Tensor, plan: StepPlan, keys: torch.Tensor | None) -> Rows:
        """Filter biased rows, and choose or draw tokens; arguments as for `read`."""
        raise NotImplementedError

    def read(
        self,
        logits: torch.Tensor,
        plan: StepPlan,
        keys: torch.Tensor | None,
        noise: torch.Tensor | None = None,
    ) -> Rows:
        """Choose the tokens of the ``n`` canvases of a plan.

        The logits ``[n * L, vocabulary]`` are overwritten with the biased ones. The keys of the
        random numbers (int64 ``[n, L]``) are None if no request draws. `noise` are random tokens
        (int64 ``[n, L]``) that an algorithm of uniform noise may choose.
        """
        on_host = plan.on_host
        if plan.adjust is not None:
            ids, amount = (part.reshape(-1, 1) for part in plan.adjust)
            logits.scatter_add_(1, ids, amount.to(logits.dtype))
        # The tokens to report are known only after biases have been applied.
        raw = {}
        for index, _, options in self._reported_raw(on_host):
            own = logits.unflatten(0, (-1, self.slots.length))[index]
            raw[index] = own.clone() if options.biases else own
        if self.slots.needs_rows[on_host].any():
            self.parts.rows.apply_biases(logits, plan)
        chosen = self.choose(logits, plan, keys)
        if plan.constraint is not None:
            plan.constraint.choose_paths(chosen, plan)
        if self.slots.reports[on_host].any():

            def scores_of(index: int, positions: slice) -> torch.Tensor:
                rows = raw.get(index)
                return chosen.reported(index, positions) if rows is None else rows[positions]

            candidates = self._candidates(chosen.statistics, plan, noise)
            self.parts.logprobs.capture(on_host, scores_of, candidates)
        return chosen

    def copies_rows(self, on_host: np.ndarray) -> bool:
        """Whether logits of this batch (slots int ``[n]``) are copied before they are biased."""
        return any(options.biases for _, _, options in self._reported_raw(on_host))

    def _reported_raw(self, on_host: np.ndarray) -> list[tuple[int, int, RowOptions]]:
        """The requests whose logprobs come from raw logits, as from `LogprobReports.asking`."""
        if not self.reports_raw or not self.slots.reports[on_host].any():
            return []
        reports = self.parts.logprobs
        return reports.asking(on_host) if reports.of_raw_logits else []

    def _candidates(
        self, statistics: RowStatistics, plan: StepPlan, noise: torch.Tensor | None
    ) -> torch.Tensor:
        """The tokens that canvases may hold after `Algorithm.step`, int64 ``[n, L, C]``."""
        length = self.slots.length
        # An id of the tokenizer may lie outside the head, but only in a prompt.
        held = self.slots.tokens.index_select(0, plan.slots)
        parts = [statistics.token.view(-1, length), held.clamp_max(self.slots.kind.vocabulary - 1)]
        if isinstance(statistics, SampledStatistics):
            parts.append(statistics.sample.view(-1, length))
        if noise is not None:
            parts.append(noise)
        candidates = torch.stack(parts, -1)
        return candidates if plan.ask is None else torch.cat([candidates, plan.ask], -1)


class MaskedPipeline(LogitsPipeline[MaskedRows]):
    """Chooses the likeliest token other than the mask, or a drawn one."""

    reports_raw = True

    def __init__(
        self,
        parts: OptionalParts,
        mask_token: int,
        statistics: StatisticsOfRows,
        kernels: MaskedKernels | None,
        compile: bool,
    ) -> None:
        """Choose with `statistics`, and draw with `kernels` or (maybe compiled) operators."""
        super().__init__(parts)
        self.mask_token = mask_token
        self.statistics = statistics
        self.kernels = kernels
        self.draw = CompiledOnce(draw) if compile else draw
        self.keys = compiled(candidate_keys) if compile else candidate_keys

    def readings(self, head: Head, hidden: torch.Tensor, plan: StepPlan, canvases: int) -> Readings:
        """Read whole rows of logits of `canvases` canvases at a time; see `Readout.read`."""
        length, count = self.slots.length, len(plan.slots)
        statistics, logprob, asked, ranked = [], [], [], []
        copies = self.copies_rows(plan.on_host)  # which double the memory
        at_once = max(1, canvases // 2) if copies else canvases
        for first in range(0, count, at_once):
            end = min(first + at_once, count)
            part, own = plan.part(first, end), hidden[first * length : end * length]
            part.rows = self._rows_of(part)
            logits = head(own if part.rows is None else own.index_select(0, part.rows))
            keys = self._keys_of(part.slots) if plan.draws else None
            chosen = self.read(logits, part, keys)
            statistics.append(chosen.statistics)
            if chosen.logprob is not None:
                logprob.append(chosen.logprob)
            if part.ask is not None:
                ids = part.ask.flatten(0, 1)  # [rows, K]
                total = logits.float().logsumexp(-1, keepdim=True)
                asked.append(logits.gather(1, ids).float() - total)
            if part.batch.likeliest:
                ranked.append(ranked_tokens(logits, self.mask_token, part.batch.likeliest))
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
        whole = plan.adjust is not None or plan.ask is not None or plan.needs_logprob
        whole = whole or plan.batch.likeliest > 0
        if whole or self.slots.needs_rows[plan.on_host].any():
            return None
        return plan.masked_rows()

    def _keys_of(self, slots: torch.Tensor) -> torch.Tensor:
        """Keys of the random numbers of all positions of ``slots`` (int64 ``[n]``): ``[n, L]``."""
        return self.keys(Counters.of_canvases(self.slots, slots)).view(-1, self.slots.length)

    def warm_up(self, logits: torch.Tensor) -> None:
        """Call the functions that draw, see `Readout.warm_up`."""
        keys = self._keys_of(torch.tensor([0], device=logits.device)).flatten()
        if self.kernels is not None:
            self.kernels.drawn(logits[: len(keys)], None, keys, self.mask_token)
            return
        # Make it contiguous, as in a step: the head may return a view of a wider tensor.
        scaled = logits.float().contiguous()
        rows = torch.arange(len(logits), device=logits.device)
        self.draw(scaled, rows)

    def choose(self, logits: torch.Tensor, plan: StepPlan, keys: torch.Tensor | None) -> MaskedRows:
        """See `LogitsPipeline`. Filters apply after the temperature."""
        chosen = self._choose(logits, plan, keys)
        if plan.rows is None:
            return chosen
        count = len(plan.slots) * self.slots.length
        place = torch.full((count,), -1).index_copy_(0, plan.rows, torch.arange(len(plan.rows)))
        return replace(
            chosen,
            statistics=chosen.statistics.spread(plan.rows, count),
            greedy=chosen.greedy.spread(plan.rows, count),
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
            return MaskedRows(greedy, greedy, logits, samples, logprob)
        temperature, flat = self._per_row(plan.temperature, plan), keys.flatten()
        if plan.rows is not None:
            flat = flat.index_select(0, plan.rows)
        draws = temperature > 0
        needs_rows = self.slots.needs_rows[plan.on_host].any()
        constrained = self.slots.constrained[plan.on_host]
        if self.kernels is not None and not needs_rows and not constrained.any():
            drawn, weight = self.kernels.drawn(logits, temperature, flat, self.mask_token)
            chosen, logprob = self._drawn(greedy, plan, temperature, draws, drawn, weight)
            return MaskedRows(chosen, greedy, logits, samples, logprob)
        tempered = logits.float() / torch.where(draws, temperature, 1.0)[:, None]
        tempered[:, self.mask_token].fill_(-torch.inf)
        kept = self.parts.rows.filtered(tempered, plan) if needs_rows else tempered
        chosen = greedy
        # Constrained canvases draw later, when they follow their paths.
        if (samples & ~constrained).any():
            if self.kernels is not None:  # a filter never excludes the likeliest token
                drawn, weight = self.kernels.drawn(kept, None, flat, self.mask_token)
            else:
                drawn = self.draw(kept, flat)
                weight = drawn_weight(greedy, tempered, drawn)
            chosen, logprob = self._drawn(greedy, plan, temperature, draws, drawn, weight)
        return MaskedRows(chosen, greedy, logits, samples, logprob, tempered, kept, keys)

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
    ) -> tuple[RowStatistics, torch.Tensor | None]:
        """The statistics with drawn tokens, and `Readings.logprob`; tensors are ``[rows]``."""
        own = plan.own_confidence
        if own is not None:
            own = self._per_row(own, plan)
        chosen = with_drawn(greedy, weight, draws, drawn, own)
        logprob = drawn_logprob(greedy, weight, temperature) if plan.needs_logprob else None
        return chosen, logprob


class NoisePipeline(LogitsPipeline[NoiseRows]):
    """Chooses the likeliest token and a drawn one, for one canvas per call."""

    reports_raw = False

    def choose(self, logits: torch.Tensor, plan: StepPlan, keys: torch.Tensor | None) -> NoiseRows:
        """See `LogitsPipeline`. Filters apply before the temperature."""
        assert keys is not None
        kept = logits
        if self.slots.needs_rows[plan.on_host].any():
            kept = self.parts.rows.filtered(logits, plan)
        temperature, flat = plan.temperature.expand(self.slots.length), keys[0]
        statistics, distribution = sampled_statistics(kept, temperature, flat)
        plain = self.slots.read_only.index_select(0, plan.slots) | (plan.temperature == 0)
        divisor = torch.where(plain, 1.0, plan.temperature)
        return NoiseRows(statistics, distribution, kept, flat, divisor)
