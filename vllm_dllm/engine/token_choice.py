"""The choice of tokens from whole rows of logits: bias, filter, draw, constrain, report.

This module is loaded for the first batch in which a request draws or needs whole rows. How tokens
are chosen from biased rows differs between masked and uniform-noise models; everything else is the
same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import numpy as np
import torch

from vllm_dllm.engine.readout import ReadRequest
from vllm_dllm.engine.row_options import LogitBiases, RowOptions, RowWork, filtered
from vllm_dllm.ops.statistics.rows import (
    RowStatistics,
    SampledStatistics,
    drawn_logprob,
    drawn_weight,
    with_drawn,
)
from vllm_dllm.ops.statistics.sampled import sampled_statistics

if TYPE_CHECKING:
    from vllm_dllm.engine.logprobs import LogprobReports
    from vllm_dllm.engine.optional_parts import OptionalParts

# Maps (logits [rows, vocabulary], forbidden id, entropy) to statistics [rows], like
# `row_statistics`.
StatisticsOfRows = Callable[[torch.Tensor, int, bool], RowStatistics]
# Maps (tempered logits [rows, vocabulary], keys [rows]) to ids [rows], like `sampled.draw`.
Draw = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class RowChoice(Protocol):
    """The tokens chosen from the rows of a part of the batch."""

    @property
    def statistics(self) -> RowStatistics:
        """Statistics ``[rows]``; those of constrained canvases have the tokens of their paths."""
        ...

    def reported(self, index: int, positions: slice) -> torch.Tensor:
        """The scores ``[positions, vocabulary]`` from which logprobs are computed.

        Args:
            index: the canvas' position in this part of the batch.
            positions: a slice of the canvas' positions.
        """
        ...


Rows = TypeVar("Rows", bound=RowChoice, covariant=True)


class TokenChoice(Protocol[Rows]):
    """Chooses tokens from biased rows of logits.

    Attributes:
        reports_raw: whether logprobs may come from raw logits.
    """

    reports_raw: bool

    def choose(self, logits: torch.Tensor, request: ReadRequest, keys: torch.Tensor | None) -> Rows:
        """Filter the rows, and choose or draw tokens; arguments as for `LogitsPipeline.read`."""
        ...


@dataclass
class MaskedRows:
    """See `RowChoice`; for a masked model. The rows are the ``n * L`` positions of n canvases.

    Attributes:
        statistics: ``[rows]``, with drawn tokens for requests that draw.
        greedy: ``[rows]``, the statistics as if no request drew.
        logits: ``[rows, ids]``, the biased logits.
        tempered: ``[rows, ids]``, logits divided by the temperature; None if no request draws.
        filtered: ``[rows, ids]``, `tempered` with -inf for tokens that filters exclude, or None.
        keys: int64 ``[n, L]``, the keys of the random numbers, or None.
        samples: bool ``[n]``, on the host, whether a request draws.
        length: L.
        own_confidence_temperature: see `ReadRequest`.
        logprob: float32 ``[rows]``, see `Readings`.
    """

    statistics: RowStatistics
    greedy: RowStatistics
    logits: torch.Tensor
    tempered: torch.Tensor | None
    filtered: torch.Tensor | None
    keys: torch.Tensor | None
    samples: list[bool]
    length: int
    own_confidence_temperature: torch.Tensor | None = None
    logprob: torch.Tensor | None = None

    def reported(self, index: int, positions: slice) -> torch.Tensor:
        """See `RowChoice`: the logits from which the tokens were chosen or drawn."""
        drawn = self.samples[index] and self.filtered is not None
        rows: torch.Tensor = self.filtered if drawn else self.logits  # type: ignore[assignment]
        return rows.unflatten(0, (-1, self.length))[index, positions]


class MaskedChoice:
    """See `TokenChoice`: the likeliest token other than the mask, or a drawn one."""

    reports_raw = True

    def __init__(
        self, parts: OptionalParts, mask_token: int, statistics: StatisticsOfRows, draw: Draw
    ) -> None:
        self.parts = parts
        self.slots = parts.slots
        self.mask_token = mask_token
        self.statistics = statistics
        self.draw = draw

    def choose(
        self, logits: torch.Tensor, request: ReadRequest, keys: torch.Tensor | None
    ) -> MaskedRows:
        """See `TokenChoice`. Filters apply after the temperature."""
        length, samples = self.slots.length, self.slots.samples[request.on_host]
        greedy = self.statistics(logits, self.mask_token, request.entropy)
        logprob = greedy.probability.log() if request.logprob else None
        if keys is None or not samples.any():
            own = samples.tolist()
            return MaskedRows(
                greedy, greedy, logits, None, None, None, own, length, logprob=logprob
            )
        temperature = request.temperature.repeat_interleave(length)
        tempered = logits.float() / torch.where(temperature > 0, temperature, 1.0)[:, None]
        tempered[:, self.mask_token] = -torch.inf
        kept = tempered
        if self.slots.needs_rows[request.on_host].any():
            kept = filtered(tempered, self.parts.rows, request)
        chosen = greedy
        # Constrained canvases draw later, when they follow their paths.
        if (samples & ~self.slots.constrained[request.on_host]).any():
            drawn = self.draw(kept, keys.flatten())
            weight, own = drawn_weight(greedy, tempered, drawn), request.own_confidence_rows(length)
            chosen = with_drawn(greedy, weight, temperature > 0, drawn, own)
            if request.logprob:
                logprob = drawn_logprob(greedy, weight, temperature)
        return MaskedRows(
            statistics=chosen,
            greedy=greedy,
            logits=logits,
            tempered=tempered,
            filtered=kept,
            keys=keys,
            samples=samples.tolist(),
            length=length,
            own_confidence_temperature=request.own_confidence_temperature,
            logprob=logprob,
        )


@dataclass
class NoiseRows:
    """See `RowChoice`; for a model of uniform noise. The rows are those of one canvas.

    Attributes:
        statistics: ``[L]``.
        distribution: float32 ``[L, ids]``, the probabilities at the temperature.
        logits: ``[L, ids]``, the biased and filtered logits.
        temperature: float32 ``[L]``.
        keys: int64 ``[L]``, the keys of the random numbers.
        divisor: float32 ``[1]``, the number that logits are divided by before logprobs are
            computed.
    """

    statistics: SampledStatistics
    distribution: torch.Tensor
    logits: torch.Tensor
    temperature: torch.Tensor
    keys: torch.Tensor
    divisor: torch.Tensor

    def reported(self, index: int, positions: slice) -> torch.Tensor:
        """See `RowChoice`."""
        return self.logits[positions] / self.divisor


class NoiseChoice:
    """See `TokenChoice`: statistics with samples, for one canvas per call."""

    reports_raw = False

    def __init__(self, parts: OptionalParts) -> None:
        self.parts = parts
        self.slots = parts.slots

    def choose(
        self, logits: torch.Tensor, request: ReadRequest, keys: torch.Tensor | None
    ) -> NoiseRows:
        """See `TokenChoice`. Filters apply before the temperature."""
        assert keys is not None
        kept = logits
        if self.slots.needs_rows[request.on_host].any():
            kept = filtered(logits, self.parts.rows, request)
        temperature, flat = request.temperature.expand(self.slots.length), keys[0]
        statistics, distribution = sampled_statistics(kept, temperature, flat)
        plain = self.slots.read_only.index_select(0, request.slots) | (request.temperature == 0)
        divisor = torch.where(plain, 1.0, request.temperature)
        return NoiseRows(statistics, distribution, kept, temperature, flat, divisor)


class LogitsPipeline(Generic[Rows]):
    """The one place where whole rows of logits are changed, chosen from and reported."""

    def __init__(self, parts: OptionalParts, choice: TokenChoice[Rows]) -> None:
        self.slots = parts.slots
        self.parts = parts
        self.choice = choice

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

        Returns:
            What was chosen, ``[n * L]`` rows.
        """
        if request.adjust is not None:
            ids, amount = (part.reshape(-1, 1) for part in request.adjust)
            logits.scatter_add_(1, ids, amount.to(logits.dtype))
        has_options = self.slots.needs_rows[request.on_host].any()
        reports = self.parts.logprobs if self.slots.reports[request.on_host].any() else None
        raw = {} if reports is None else self._raw_rows(reports, logits, request.on_host)
        if has_options:
            LogitBiases(self.parts.rows).apply(logits, request)
        chosen = self.choice.choose(logits, request, keys)
        if request.constraint is not None:
            request.constraint.choose_paths(chosen, request)
        if reports is not None:
            candidates = self._candidates(chosen, request, noise)

            def scores_of(index: int, positions: slice) -> torch.Tensor:
                rows = raw.get(index)
                return chosen.reported(index, positions) if rows is None else rows[positions]

            reports.capture(request.on_host, scores_of, candidates)
        return chosen

    def _reported_raw(
        self, reports: LogprobReports, on_host: np.ndarray
    ) -> list[tuple[int, int, RowOptions]]:
        """The requests whose logprobs come from raw logits, as from `LogprobReports.asking`."""
        if self.choice.reports_raw and reports.of_raw_logits:
            return reports.asking(on_host)
        return []

    def copies_rows(self, on_host: np.ndarray) -> bool:
        """Whether logits of this batch (slots int ``[n]``) are copied before they are biased."""
        if not self.slots.reports[on_host].any():
            return False
        asking = self._reported_raw(self.parts.logprobs, on_host)
        return any(bool(options.work & RowWork.BIASES) for _, _, options in asking)

    def _raw_rows(
        self, reports: LogprobReports, logits: torch.Tensor, on_host: np.ndarray
    ) -> dict[int, torch.Tensor]:
        """Raw logits ``[L, vocabulary]`` to report, by index in the batch; copied if biased.

        The tokens to report are known only after biases have been applied.
        """
        canvases = logits.unflatten(0, (-1, self.slots.length))
        return {
            index: canvases[index].clone() if options.work & RowWork.BIASES else canvases[index]
            for index, _, options in self._reported_raw(reports, on_host)
        }

    def _candidates(
        self, chosen: RowChoice, request: ReadRequest, noise: torch.Tensor | None
    ) -> torch.Tensor:
        """The tokens that the canvases may hold after the step, int64 ``[n, L, C]``.

        `Algorithm.step` lists them. Tokens of paths are among the chosen ones.
        """
        statistics, length = chosen.statistics, self.slots.length
        # An id of the tokenizer may lie outside the head, but only in a prompt.
        held = self.slots.tokens.index_select(0, request.slots)
        parts = [statistics.token.view(-1, length), held.clamp_max(self.slots.kind.vocabulary - 1)]
        if isinstance(statistics, SampledStatistics):
            parts.append(statistics.sample.view(-1, length))
        if noise is not None:
            parts.append(noise)
        candidates = torch.stack(parts, -1)
        return candidates if request.ask is None else torch.cat([candidates, request.ask], -1)
