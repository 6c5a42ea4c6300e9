"""How tokens are chosen from biased rows of logits: by masked models, and by uniform noise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from vllm_dllm.engine.logit_biases import filtered
from vllm_dllm.engine.readout.contract import ReadRequest
from vllm_dllm.engine.slots import SlotState
from vllm_dllm.ops.statistics.rows import (
    EntropyStatistics,
    RowStatistics,
    SampledStatistics,
    drawn_logprob,
    drawn_weight,
    with_drawn,
)
from vllm_dllm.ops.statistics.sampled import draw_and_sum, sampled_statistics

if TYPE_CHECKING:
    from vllm_dllm.constraints.grammar import (
        BatchConstraint,
        CanvasLogits,
        CanvasWindow,
        ConstrainedPath,
    )

# From (logits [rows, vocabulary], forbidden id, entropy) to statistics [rows], like
# `row_statistics`.
StatisticsOfRows = Callable[[torch.Tensor, int, bool], RowStatistics]
# From (tempered logits [rows, vocabulary], keys [rows]) to ids [rows], like `sampled.draw`.
Draw = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Followed:
    """Some canvases of a part of a batch, and what they must follow.

    Attributes:
        constraint: of these ``m`` canvases.
        window: these canvases as the constraint sees them.
        index: int64 ``[m]``, the canvases' positions in this part of the batch.
        on_host: the same positions on the host.
    """

    constraint: BatchConstraint
    window: CanvasWindow
    index: torch.Tensor
    on_host: np.ndarray

    def logits(self, rows: torch.Tensor) -> CanvasLogits:
        """Their rows of those of the part, ``[n * L, ids]``."""
        from vllm_dllm.constraints.grammar import CanvasLogits

        length = self.window.forced.shape[1]
        return CanvasLogits(rows.unflatten(0, (-1, length)), self.index, self.on_host)


class RowChoice(Protocol):
    """The tokens that were chosen from the rows of a part of the batch."""

    @property
    def statistics(self) -> RowStatistics:
        """Statistics ``[rows]``; those of constrained canvases have the tokens of their paths."""
        ...

    def follow(self, followed: Followed, draws: bool) -> ConstrainedPath:
        """Replace the chosen tokens and their confidences by those of paths.

        Args:
            followed: some constrained canvases of this part of the batch.
            draws: whether their requests draw.

        Returns:
            The paths, whose tokens may be committed.
        """
        ...

    def reported(self, index: int, positions: slice) -> torch.Tensor:
        """The scores ``[positions, vocabulary]`` from which logprobs are computed.

        Args:
            index: the canvas' position in this part of the batch.
            positions: a slice of the canvas' positions.
        """
        ...


class TokenChoice(Protocol):
    """Chooses tokens from biased rows of logits.

    Attributes:
        reports_raw: whether logprobs may be those of raw logits.
    """

    reports_raw: bool

    def choose(
        self, logits: torch.Tensor, request: ReadRequest, keys: torch.Tensor | None
    ) -> RowChoice:
        """Filter the rows, and choose or draw tokens; arguments as for `LogitsPipeline.read`."""
        ...


@dataclass
class MaskedRows:
    """See `RowChoice`; for a masked model. The rows are the ``n * L`` positions of n canvases.

    Attributes:
        statistics: ``[rows]``, with drawn tokens where a request draws.
        greedy: ``[rows]``, the statistics that there would be if no request drew.
        logits: ``[rows, ids]``, the biased logits.
        tempered: ``[rows, ids]``, logits divided by the temperature; None where no request draws.
        filtered: ``[rows, ids]``, `tempered` with -inf for what filters exclude, or None.
        keys: int64 ``[n, L]``, the keys of the random numbers, or None.
        samples: bool ``[n]``, on the host, whether a request draws.
        length: L.
        own_at: see `ReadRequest`.
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
    own_at: torch.Tensor | None = None
    logprob: torch.Tensor | None = None

    def follow(self, followed: Followed, draws: bool) -> ConstrainedPath:
        """See `RowChoice`.

        The confidence of a most probable path's token is its probability; that of a drawn path's
        token comes from `with_drawn`. Positions behind the end of the text have confidence 1.
        """
        from vllm_dllm.constraints.grammar import best_tokens, drawn_tokens, path_probability

        statistics, shape, index = self.statistics, (-1, self.length), followed.index
        greedy = self.greedy.view(*shape).take(index)
        if draws and self.tempered is not None and self.filtered is not None:
            assert self.keys is not None
            keys = self.keys.index_select(0, index)
            kept, window = followed.logits(self.filtered), followed.window
            free = kept.drawn(window.wanted(), keys, draw_and_sum)
            chosen = drawn_tokens(followed.constraint, kept, window, free, keys)
            tempered = followed.logits(self.tempered)
            both = torch.stack([chosen.token, greedy.token], -1)
            weight, largest = tempered.pick(both).unbind(-1)
            own = None if self.own_at is None else self.own_at.index_select(0, index)[:, None]
            sampled = with_drawn(greedy, (weight - largest).exp(), chosen.inside, chosen.token, own)
            sure = torch.where(chosen.inside, sampled.probability, 1.0)
        else:
            logits = followed.logits(self.logits)
            free = logits.best(greedy.token)
            chosen = best_tokens(followed.constraint, logits, followed.window, free)
            sure = path_probability(chosen, free.weight, greedy.probability)
        statistics.token.view(shape).index_copy_(0, index, chosen.token)
        statistics.probability.view(shape).index_copy_(0, index, sure)
        if isinstance(statistics, EntropyStatistics):
            own = statistics.entropy.view(shape)
            entropy = torch.where(chosen.inside, own.index_select(0, index), 0.0)
            own.index_copy_(0, index, entropy)
        return chosen

    def reported(self, index: int, positions: slice) -> torch.Tensor:
        """See `RowChoice`: the logits from which the tokens were chosen or drawn."""
        drawn = self.samples[index] and self.filtered is not None
        rows: torch.Tensor = self.filtered if drawn else self.logits  # type: ignore[assignment]
        return rows.unflatten(0, (-1, self.length))[index, positions]


class MaskedChoice:
    """See `TokenChoice`: the likeliest token other than the mask, or a drawn one."""

    reports_raw = True

    def __init__(
        self, slots: SlotState, mask_token: int, statistics: StatisticsOfRows, draw: Draw
    ) -> None:
        self.slots = slots
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
        kept = filtered(tempered, self.slots, request)
        chosen = greedy
        # Constrained canvases draw when they follow their paths.
        if (samples & ~self.slots.constraints.constrained(request.on_host)).any():
            drawn = self.draw(kept, keys.flatten())
            weight, own_at = drawn_weight(greedy, tempered, drawn), request.own_at_rows(length)
            chosen = with_drawn(greedy, weight, temperature > 0, drawn, own_at)
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
            own_at=request.own_at,
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
        divisor: float32 ``[1]``, what logits are divided by before logprobs are computed.
    """

    statistics: SampledStatistics
    distribution: torch.Tensor
    logits: torch.Tensor
    temperature: torch.Tensor
    keys: torch.Tensor
    divisor: torch.Tensor

    def follow(self, followed: Followed, draws: bool) -> ConstrainedPath:
        """See `RowChoice`: tokens come from the most probable path, samples from a drawn one.

        Entropies stay those of the model, because the algorithm decides what it accepts. They are 0
        behind the budget. Behind the end of a path's text a canvas keeps what the model writes
        there (DiffusionGemma does not repeat end-of-sequence tokens), because it reads it again.
        """
        from vllm_dllm.constraints.grammar import FreeTokens, best_and_drawn_tokens, best_tokens

        constraint, window, own = followed.constraint, followed.window, self.statistics
        logits = followed.logits(self.logits)
        free = logits.best(own.token[None])
        if draws:
            warmth, keys = self.temperature[None], self.keys[None]
            sampled = FreeTokens(own.sample[None], free.weight / warmth - own.probability.log())
            best, drawn = best_and_drawn_tokens(
                constraint, logits, warmth, window, (free, sampled), keys
            )
        else:
            best = drawn = best_tokens(constraint, logits, window, free)
        token = torch.where(constraint.behind_end(best)[0], own.token, best.token[0])
        sample = torch.where(constraint.behind_end(drawn)[0], own.sample, drawn.token[0])
        pick = [self.distribution.gather(1, ids[:, None])[:, 0] for ids in (token, sample)]
        entropy = torch.where(best.inside[0], own.entropy, 0.0)
        self.statistics = SampledStatistics(token, pick[0], sample, pick[1], entropy)
        return best

    def reported(self, index: int, positions: slice) -> torch.Tensor:
        """See `RowChoice`."""
        return self.logits[positions] / self.divisor


class NoiseChoice:
    """See `TokenChoice`: statistics with samples, for one canvas per call."""

    reports_raw = False

    def __init__(self, slots: SlotState) -> None:
        self.slots = slots

    def choose(
        self, logits: torch.Tensor, request: ReadRequest, keys: torch.Tensor | None
    ) -> NoiseRows:
        """See `TokenChoice`. Filters apply before the temperature."""
        assert keys is not None
        kept = filtered(logits, self.slots, request)
        temperature, flat = request.temperature.expand(self.slots.length), keys[0]
        statistics, distribution = sampled_statistics(kept, temperature, flat)
        plain = self.slots.read_only.index_select(0, request.slots) | (request.temperature == 0)
        divisor = torch.where(plain, 1.0, request.temperature)
        return NoiseRows(statistics, distribution, kept, temperature, flat, divisor)
