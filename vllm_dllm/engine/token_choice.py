"""The choice of tokens from whole rows of logits: bias, filter, draw, constrain, report.

This module is loaded for the first batch in which a request draws or needs whole rows. How tokens
are chosen from biased rows differs between masked and uniform-noise models; everything else is the
same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
import torch

from vllm_dllm.engine.readout import Readings, ReadRequest
from vllm_dllm.engine.row_options import RowOptions
from vllm_dllm.ops.compiled import CompiledOnce, compiled
from vllm_dllm.ops.noise.keyed import Counters, candidate_keys
from vllm_dllm.ops.statistics.ranked import RankedTokens, ranked_tokens
from vllm_dllm.ops.statistics.rows import RowStatistics, SampledStatistics
from vllm_dllm.ops.statistics.sampled import (
    draw,
    drawn_logprob,
    drawn_weight,
    sampled_statistics,
    with_drawn,
)

if TYPE_CHECKING:
    from vllm_dllm.engine.optional_parts import OptionalParts
    from vllm_dllm.engine.readout_triton import MaskedKernels

# Maps (logits [rows, vocabulary], forbidden id, entropy) to statistics [rows], like
# `row_statistics`.
StatisticsOfRows = Callable[[torch.Tensor, int, bool], RowStatistics]
# Maps hidden states [rows, hidden] to logits [rows, vocabulary].
Head = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class MaskedRows:
    """The choice of a masked model from the rows of n canvases, ``n * L`` positions.

    Attributes:
        statistics: ``[rows]``, with drawn tokens for requests that draw; those of constrained
            canvases have the tokens of their paths.
        greedy: ``[rows]``, the statistics as if no request drew.
        logits: ``[rows, ids]``, the biased logits.
        samples: bool ``[n]``, on the host, whether a request draws.
        logprob: float32 ``[rows]``, see `Readings`.
        tempered: ``[rows, ids]``, logits divided by the temperature; None if no request draws.
        filtered: ``[rows, ids]``, `tempered` with -inf for tokens that filters exclude, or None.
        keys: int64 ``[n, L]``, the keys of the random numbers, or None.
        place: int64 ``[n, L]``, the row of each position in these logits, or -1 if it was not read;
            None if every position has its own.
    """

    statistics: RowStatistics
    greedy: RowStatistics
    logits: torch.Tensor
    samples: np.ndarray
    logprob: torch.Tensor | None
    tempered: torch.Tensor | None = None
    filtered: torch.Tensor | None = None
    keys: torch.Tensor | None = None
    place: torch.Tensor | None = None

    def reported(self, index: int, positions: slice) -> torch.Tensor:
        """The scores from which logprobs are computed, ``[positions, vocabulary]``.

        They are the logits from which the tokens were chosen or drawn.

        Args:
            index: the canvas' position in this part of the batch.
            positions: a slice of the canvas' positions.
        """
        drawn = self.filtered if self.samples[index] else None
        rows = self.logits if drawn is None else drawn
        return rows.unflatten(0, (len(self.samples), -1))[index, positions]


@dataclass
class NoiseRows:
    """The choice of a model of uniform noise from the rows of one canvas.

    Attributes:
        statistics: ``[L]``; those of a constrained canvas have the tokens of its paths.
        distribution: float32 ``[L, ids]``, the probabilities at the temperature.
        logits: ``[L, ids]``, the biased and filtered logits.
        keys: int64 ``[L]``, the keys of the random numbers.
        divisor: float32 ``[1]``, the number that logits are divided by before logprobs are
            computed.
    """

    statistics: SampledStatistics
    distribution: torch.Tensor
    logits: torch.Tensor
    keys: torch.Tensor
    divisor: torch.Tensor

    def reported(self, index: int, positions: slice) -> torch.Tensor:
        """See `MaskedRows.reported`."""
        return self.logits[positions] / self.divisor


Rows = TypeVar("Rows", MaskedRows, NoiseRows)


class LogitsPipeline(Generic[Rows]):
    """The one place where whole rows of logits are changed, chosen from and reported.

    Attributes:
        reports_raw: whether logprobs may come from raw logits.
    """

    reports_raw: bool

    def __init__(self, parts: OptionalParts) -> None:
        self.slots = parts.slots
        self.parts = parts

    def choose(self, logits: torch.Tensor, request: ReadRequest, keys: torch.Tensor | None) -> Rows:
        """Filter biased rows, and choose or draw tokens; arguments as for `read`."""
        raise NotImplementedError

    def read(
        self,
        logits: torch.Tensor,
        request: ReadRequest,
        keys: torch.Tensor | None,
        noise: torch.Tensor | None = None,
    ) -> Rows:
        """Choose the tokens of ``n`` canvases.

        Args:
            logits: ``[n * L, vocabulary]``, overwritten with the biased logits.
            request: the request for these canvases.
            keys: int64 ``[n, L]``, the keys of the random numbers; None if no request draws.
            noise: int64 ``[n, L]``, random tokens that an algorithm of uniform noise may choose.
        """
        on_host = request.on_host
        if request.adjust is not None:
            ids, amount = (part.reshape(-1, 1) for part in request.adjust)
            logits.scatter_add_(1, ids, amount.to(logits.dtype))
        # The tokens to report are known only after biases have been applied.
        raw = {}
        for index, _, options in self._reported_raw(on_host):
            own = logits.unflatten(0, (-1, self.slots.length))[index]
            raw[index] = own.clone() if options.biases else own
        if self.slots.needs_rows[on_host].any():
            self.parts.rows.apply_biases(logits, request)
        chosen = self.choose(logits, request, keys)
        if request.constraint is not None:
            request.constraint.choose_paths(chosen, request)
        if self.slots.reports[on_host].any():

            def scores_of(index: int, positions: slice) -> torch.Tensor:
                rows = raw.get(index)
                return chosen.reported(index, positions) if rows is None else rows[positions]

            candidates = self._candidates(chosen.statistics, request, noise)
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
        self, statistics: RowStatistics, request: ReadRequest, noise: torch.Tensor | None
    ) -> torch.Tensor:
        """The tokens that the canvases may hold after the step, int64 ``[n, L, C]``.

        `Algorithm.step` lists them. Tokens of paths are among the chosen ones.
        """
        length = self.slots.length
        # An id of the tokenizer may lie outside the head, but only in a prompt.
        held = self.slots.tokens.index_select(0, request.slots)
        parts = [statistics.token.view(-1, length), held.clamp_max(self.slots.kind.vocabulary - 1)]
        if isinstance(statistics, SampledStatistics):
            parts.append(statistics.sample.view(-1, length))
        if noise is not None:
            parts.append(noise)
        candidates = torch.stack(parts, -1)
        return candidates if request.ask is None else torch.cat([candidates, request.ask], -1)


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
        """Choose with `statistics`, a function like `row_statistics`.

        What draws is `kernels`, or torch's operators, compiled if `compile` is true.
        """
        super().__init__(parts)
        self.mask_token = mask_token
        self.statistics = statistics
        self.kernels = kernels
        self.draw = CompiledOnce(draw) if compile else draw
        self.keys = compiled(candidate_keys) if compile else candidate_keys

    def readings(
        self, head: Head, hidden: torch.Tensor, request: ReadRequest, canvases: int
    ) -> Readings:
        """Read whole rows of logits of `canvases` canvases at a time; see `Readout.read`."""
        length, count = self.slots.length, len(request.slots)
        statistics, logprob, asked, ranked = [], [], [], []
        copies = self.copies_rows(request.on_host)  # which double the memory
        at_once = max(1, canvases // 2) if copies else canvases
        for first in range(0, count, at_once):
            end = min(first + at_once, count)
            part, own = request.part(first, end), hidden[first * length : end * length]
            part.rows = self._rows_of(part)
            logits = head(own if part.rows is None else own.index_select(0, part.rows))
            keys = self._keys_of(part.slots) if request.draws else None
            chosen = self.read(logits, part, keys)
            statistics.append(chosen.statistics)
            if chosen.logprob is not None:
                logprob.append(chosen.logprob)
            if part.ask is not None:
                ids = part.ask.flatten(0, 1)  # [rows, K]
                total = logits.float().logsumexp(-1, keepdim=True)
                asked.append(logits.gather(1, ids).float() - total)
            if part.likeliest:
                ranked.append(ranked_tokens(logits, self.mask_token, part.likeliest))
            del logits, chosen  # the rows of one part at a time
        joined = type(statistics[0]).join(statistics).view(-1, length)
        return Readings(
            joined,
            log_probabilities=torch.cat(asked).view(count, length, -1) if asked else None,
            logprob=torch.cat(logprob).view(-1, length) if logprob else None,
            likeliest=RankedTokens.join(ranked).view(count, length) if ranked else None,
        )

    def _rows_of(self, request: ReadRequest) -> torch.Tensor | None:
        """See `ReadRequest.rows`."""
        whole = request.adjust is not None or request.ask is not None or request.logprob
        whole = whole or request.likeliest > 0
        if whole or self.slots.needs_rows[request.on_host].any():
            return None
        return request.masked_rows()

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

    def choose(
        self, logits: torch.Tensor, request: ReadRequest, keys: torch.Tensor | None
    ) -> MaskedRows:
        """See `LogitsPipeline`. Filters apply after the temperature."""
        chosen = self._choose(logits, request, keys)
        if request.rows is None:
            return chosen
        count = len(request.slots) * self.slots.length
        place = torch.full((count,), -1).index_copy_(
            0, request.rows, torch.arange(len(request.rows))
        )
        return replace(
            chosen,
            statistics=chosen.statistics.spread(request.rows, count),
            greedy=chosen.greedy.spread(request.rows, count),
            place=place.view(-1, self.slots.length),
        )

    def _choose(
        self, logits: torch.Tensor, request: ReadRequest, keys: torch.Tensor | None
    ) -> MaskedRows:
        """`choose` in the rows that are read."""
        samples = self.slots.samples[request.on_host]
        greedy = self.statistics(logits, self.mask_token, request.entropy)
        logprob = greedy.probability.log() if request.logprob else None
        if keys is None or not samples.any():
            return MaskedRows(greedy, greedy, logits, samples, logprob)
        temperature, flat = self._per_row(request.temperature, request), keys.flatten()
        if request.rows is not None:
            flat = flat.index_select(0, request.rows)
        draws = temperature > 0
        needs_rows = self.slots.needs_rows[request.on_host].any()
        constrained = self.slots.constrained[request.on_host]
        if self.kernels is not None and not needs_rows and not constrained.any():
            drawn, weight = self.kernels.drawn(logits, temperature, flat, self.mask_token)
            chosen, logprob = self._drawn(greedy, request, temperature, draws, drawn, weight)
            return MaskedRows(chosen, greedy, logits, samples, logprob)
        tempered = logits.float() / torch.where(draws, temperature, 1.0)[:, None]
        tempered[:, self.mask_token].fill_(-torch.inf)
        kept = self.parts.rows.filtered(tempered, request) if needs_rows else tempered
        chosen = greedy
        # Constrained canvases draw later, when they follow their paths.
        if (samples & ~constrained).any():
            if self.kernels is not None:  # a filter never excludes the likeliest token
                drawn, weight = self.kernels.drawn(kept, None, flat, self.mask_token)
            else:
                drawn = self.draw(kept, flat)
                weight = drawn_weight(greedy, tempered, drawn)
            chosen, logprob = self._drawn(greedy, request, temperature, draws, drawn, weight)
        return MaskedRows(chosen, greedy, logits, samples, logprob, tempered, kept, keys)

    def _per_row(self, values: torch.Tensor, request: ReadRequest) -> torch.Tensor:
        """The temperatures ``[n]`` of canvases for each row that is read.

        The token that a commit predicts for the next canvas (`readout_shifted`) is never drawn.
        """
        rows = values.repeat_interleave(self.slots.length)
        if self.slots.kind.shifted:
            rows.view(-1, self.slots.length)[:, 0] = 0
        return rows if request.rows is None else rows.index_select(0, request.rows)

    def _drawn(
        self,
        greedy: RowStatistics,
        request: ReadRequest,
        temperature: torch.Tensor,
        draws: torch.Tensor,
        drawn: torch.Tensor,
        weight: torch.Tensor,
    ) -> tuple[RowStatistics, torch.Tensor | None]:
        """The statistics with drawn tokens, and `Readings.logprob`; tensors are ``[rows]``."""
        own = request.own_confidence_temperature
        if own is not None:
            own = self._per_row(own, request)
        chosen = with_drawn(greedy, weight, draws, drawn, own)
        logprob = drawn_logprob(greedy, weight, temperature) if request.logprob else None
        return chosen, logprob


class NoisePipeline(LogitsPipeline[NoiseRows]):
    """Chooses the likeliest token and a drawn one, for one canvas per call."""

    reports_raw = False

    def choose(
        self, logits: torch.Tensor, request: ReadRequest, keys: torch.Tensor | None
    ) -> NoiseRows:
        """See `LogitsPipeline`. Filters apply before the temperature."""
        assert keys is not None
        kept = logits
        if self.slots.needs_rows[request.on_host].any():
            kept = self.parts.rows.filtered(logits, request)
        temperature, flat = request.temperature.expand(self.slots.length), keys[0]
        statistics, distribution = sampled_statistics(kept, temperature, flat)
        plain = self.slots.read_only.index_select(0, request.slots) | (request.temperature == 0)
        divisor = torch.where(plain, 1.0, request.temperature)
        return NoiseRows(statistics, distribution, kept, flat, divisor)
