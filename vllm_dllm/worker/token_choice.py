"""How tokens are chosen from biased rows of logits: for masks, and for uniform noise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from vllm_dllm.constraints.decoding.best_path import CanvasWindow
from vllm_dllm.constraints.decoding.constrained_step import ConstrainedPath, path_probability
from vllm_dllm.ops.statistics.rows import (
    EntropyStatistics,
    RowStatistics,
    SampledStatistics,
    with_samples,
)
from vllm_dllm.ops.statistics.sampled import sampled_statistics
from vllm_dllm.worker.constraint_state import Follower
from vllm_dllm.worker.logit_biases import filtered
from vllm_dllm.worker.readout.contract import ReadRequest
from vllm_dllm.worker.slots import SlotState

# (logits [rows, vocabulary], forbidden id, entropy) to statistics [rows], as `row_statistics`.
StatisticsOfRows = Callable[[torch.Tensor, int, bool], RowStatistics]
# (tempered logits [rows, vocabulary], keys [rows]) to ids [rows], as `sampled.draw`.
Draw = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class RowChoice(Protocol):
    """What was chosen in the rows of some canvases."""

    @property
    def statistics(self) -> RowStatistics:
        """Statistics ``[rows]``, with the tokens of paths where canvases are constrained."""
        ...

    def follow(
        self, follower: Follower, window: CanvasWindow, draws: bool, index: torch.Tensor
    ) -> ConstrainedPath:
        """Put the tokens of paths, and how sure they are, in place of the chosen ones.

        Args:
            follower: the automaton of these canvases.
            window: what it sees of them.
            draws: whether they draw.
            index: int64 ``[m]``, which canvases.

        Returns:
            The paths, for what is committed.
        """
        ...

    def reported(self, index: int, rows: slice) -> torch.Tensor:
        """The scores ``[L, vocabulary]`` of a canvas that logprobs are taken of."""
        ...


class TokenChoice(Protocol):
    """A way to choose tokens.

    Attributes:
        reports_raw: whether logprobs may be those of raw logits.
    """

    reports_raw: bool

    def choose(
        self, logits: torch.Tensor, request: ReadRequest, keys: torch.Tensor | None
    ) -> RowChoice:
        """Filter and draw; arguments as for `LogitsPipeline.read`."""
        ...


@dataclass
class MaskedRows:
    """See `RowChoice`; of a masked model, rows are ``n * L`` positions.

    Attributes:
        statistics: ``[rows]``, with drawn tokens where a request draws.
        greedy: the same as if no request drew.
        logits: ``[rows, ids]``, biased.
        tempered: ``[rows, ids]``, logits over the temperature; None where no request draws.
        filtered: the same without what filters exclude.
        keys: int64 ``[n, L]``, or None.
        samples: bool ``[n]``, on the host, who draws.
        length: L.
    """

    statistics: RowStatistics
    greedy: RowStatistics
    logits: torch.Tensor
    tempered: torch.Tensor | None
    filtered: torch.Tensor | None
    keys: torch.Tensor | None
    samples: list[bool]
    length: int

    def follow(
        self, follower: Follower, window: CanvasWindow, draws: bool, index: torch.Tensor
    ) -> ConstrainedPath:
        """See `RowChoice`. A path's best token is as sure as its probability says.

        A drawn one is as sure as `with_samples` says; positions behind the end are sure.
        """
        found, shape = self.statistics, (-1, self.length)

        def rows(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.view(*shape, *tensor.shape[1:]).index_select(0, index)

        if draws and self.tempered is not None and self.filtered is not None:
            assert self.keys is not None
            drawn_keys = self.keys.index_select(0, index)
            chosen = follower.choose(rows(self.filtered), window, drawn_keys)
            greedy = self.greedy.view(*shape).take(index).view(-1)
            warm, token = torch.ones_like(greedy.probability), chosen.token.flatten()
            sampled = with_samples(greedy, rows(self.tempered).flatten(0, 1), warm, token)
            sure = torch.where(chosen.inside, sampled.probability.view_as(chosen.logit), 1.0)
        else:
            logits = rows(self.logits)
            chosen = follower.choose(logits, window)
            sure = path_probability(chosen, logits.float().logsumexp(-1))
        found.token.view(shape).index_copy_(0, index, chosen.token)
        found.probability.view(shape).index_copy_(0, index, sure)
        if isinstance(found, EntropyStatistics):
            entropy = torch.where(chosen.inside, rows(found.entropy), 0.0)
            found.entropy.view(shape).index_copy_(0, index, entropy)
        return chosen

    def reported(self, index: int, rows: slice) -> torch.Tensor:
        """See `RowChoice`: what the request chose from."""
        drawn = self.samples[index] and self.filtered is not None
        return (self.filtered if drawn else self.logits)[rows].clone()  # type: ignore[index]


class MaskedChoice:
    """See `TokenChoice`: the likeliest token that is no mask, or a drawn one."""

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
        """See `TokenChoice`. Filters apply behind the temperature."""
        length, samples = self.slots.length, self.slots.samples[request.on_host]
        greedy = self.statistics(logits, self.mask_token, request.entropy)
        if keys is None or not samples.any():
            return MaskedRows(greedy, greedy, logits, None, None, None, samples.tolist(), length)
        temperature = request.temperature.repeat_interleave(length)
        tempered = logits.float() / torch.where(temperature > 0, temperature, 1.0)[:, None]
        tempered[:, self.mask_token] = -torch.inf
        kept = filtered(tempered, self.slots, request.on_host)
        drawn = self.draw(kept, keys.flatten())
        found = with_samples(greedy, tempered, temperature, drawn)
        return MaskedRows(found, greedy, logits, tempered, kept, keys, samples.tolist(), length)


@dataclass
class NoiseRows:
    """See `RowChoice`; of a model of uniform noise, one canvas.

    Attributes:
        statistics: ``[L]``.
        distribution: float32 ``[L, ids]``, tempered.
        logits: ``[L, ids]``, biased and filtered.
        temperature: float32 ``[L]``.
        keys: int64 ``[L]``.
        plain: whether logprobs are those of the logits, rather than of the tempered ones.
    """

    statistics: SampledStatistics
    distribution: torch.Tensor
    logits: torch.Tensor
    temperature: torch.Tensor
    keys: torch.Tensor
    plain: bool

    def follow(
        self, follower: Follower, window: CanvasWindow, draws: bool, index: torch.Tensor
    ) -> ConstrainedPath:
        """See `RowChoice`: the best path's tokens, and a drawn path's samples.

        Entropies stay the model's: what may be accepted is for the algorithm to say. Positions
        behind the end are sure.
        """
        found = self.statistics
        best = drawn = follower.choose(self.logits[None], window)
        if draws:
            tempered = (self.logits / self.temperature[:, None])[None]
            drawn = follower.choose(tempered, window, self.keys[None])
        paths = (best, drawn)
        pick = [self.distribution.gather(1, path.token[0, :, None])[:, 0] for path in paths]
        entropy = torch.where(best.inside[0], found.entropy, 0.0)
        self.statistics = SampledStatistics(
            best.token[0], pick[0], drawn.token[0], pick[1], entropy
        )
        return best

    def reported(self, index: int, rows: slice) -> torch.Tensor:
        """See `RowChoice`."""
        return self.logits if self.plain else self.logits / self.temperature[:, None]


class NoiseChoice:
    """See `TokenChoice`: statistics with samples, for one canvas at a time."""

    reports_raw = False

    def __init__(self, slots: SlotState) -> None:
        self.slots = slots

    def choose(
        self, logits: torch.Tensor, request: ReadRequest, keys: torch.Tensor | None
    ) -> NoiseRows:
        """See `TokenChoice`. Filters apply before the temperature."""
        (slot,) = request.on_host.tolist()
        assert keys is not None
        kept = filtered(logits, self.slots, request.on_host)
        temperature, flat = request.temperature.expand(self.slots.length), keys[0]
        found, distribution = sampled_statistics(kept, temperature, flat)
        reports = slot in self.slots.row_options and self.slots.row_options[slot].reports
        # Read on the host only for a request that asks for logprobs.
        plain = reports and (bool(self.slots.read_only[slot]) or float(request.temperature[0]) == 0)
        return NoiseRows(found, distribution, kept, temperature, flat, plain)
