"""The records that the parts of a step hand to each other, and the protocols of optional parts.

`step` plans and decides, a readout reads, `sampler` reports. They meet here, and so do the optional
parts (`constraints`, `logprobs`, `records`), which none of them imports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from vllm_dllm.decoding import Algorithm, Canvas
from vllm_dllm.engine.slots import AlgorithmBatch, SlotState, SlotStatus
from vllm_dllm.ops.statistics.ranked import RankedTokens
from vllm_dllm.ops.statistics.rows import RowStatistics, SampledStatistics

# The number of rows in the examples used to compile functions ahead of time. The compiler lays out
# its loops for that size, which is a few canvases; compiled functions accept any number of rows.
EXAMPLE_ROWS = 128

MaybeTensor = TypeVar("MaybeTensor", "torch.Tensor", "torch.Tensor | None")


@dataclass(frozen=True)
class CommitPolicy:
    """When a canvas leaves, that is, when its tokens are output and its slot starts the next one.

    Attributes:
        sync: a finished canvas waits until all canvases of the batch are finished.
        early: a canvas may leave before all its positions are decided, see `emitted_length`.
        skip_last_commit: the last canvas of a request leaves without a commit.
        in_place: a denoise pass over a final canvas counts as a commit, because the model reads
            both with the same mask and the same input.
        fused: a canvas leaves before its commit, and the commit shares a forward pass with the
            next canvas.
        granted: that is one pass, for which the scheduler grants 2 L tokens; otherwise every pass
            over the next canvas repeats the commit.
    """

    sync: bool
    early: bool
    skip_last_commit: bool
    in_place: bool
    fused: bool = False
    granted: bool = False


@dataclass(frozen=True)
class Batch:
    """The part of a step that stays the same as long as its requests do.

    Attributes:
        slots: int64 ``[n]``.
        on_host: the same as a numpy array.
        flags: see `SlotState.asked`.
        by_algorithm: the canvases, grouped by algorithm; empty for a part of a batch.
        observers: what sees the decisions of the steps; empty for a part of a batch.
        entropy: whether entropies are needed.
        likeliest: how many of the likeliest tokens of each position are needed; 0 for none.
        reads_masked: whether only masked positions are read.
    """

    slots: torch.Tensor
    on_host: np.ndarray
    flags: Mapping[str, bool]
    by_algorithm: Sequence[AlgorithmBatch] = ()
    observers: Sequence[StepObserver] = ()
    entropy: bool = False
    likeliest: int = 0
    reads_masked: bool = False

    def part(self, rows: slice) -> Batch:
        """Some of the canvases."""
        slots, on_host = self.slots[rows], self.on_host[rows]
        return replace(self, slots=slots, on_host=on_host, by_algorithm=(), observers=())

    @cached_property
    def overridden(self) -> frozenset[str]:
        """Methods for which any of the algorithms has its own."""
        algorithms = {type(each.algorithm) for each in self.by_algorithm}
        return frozenset(
            name
            for name in ("temperature", "ask", "adjust")
            if any(getattr(each, name) is not getattr(Algorithm, name) for each in algorithms)
        )

    @cached_property
    def verifies(self) -> torch.Tensor | None:
        """Canvases whose algorithm verifies, bool ``[n]``; None if there is none."""
        return self.having("verifies") if self.flags["verifies"] else None

    def having(self, flag: str) -> torch.Tensor:
        """Canvases whose algorithm has this attribute, bool ``[n]``."""
        return self.in_order(
            [
                torch.full_like(each.slots, getattr(each.algorithm, flag), dtype=torch.bool)
                for each in self.by_algorithm
            ]
        )

    def in_order(self, parts: Sequence[MaybeTensor]) -> MaybeTensor:
        """Put all algorithms' rows in batch order, 0 where a part is None; None if all are."""
        first: MaybeTensor = next((part for part in parts if part is not None), parts[0])
        if first is None or len(parts) == 1:
            return first
        whole = first.new_zeros((len(self.slots), *first.shape[1:]))
        for part, each in zip(parts, self.by_algorithm, strict=True):
            if part is not None and each.index is not None:
                whole.index_copy_(0, each.index, part)
        return whole


@dataclass
class StepPlan:
    """The batch before a step, and what must be read from the model's output for it.

    Attributes:
        batch: the requests.
        state: the engine's slots.
        width: number of positions of each canvas, int64 ``[n]``, or L for all of them.
        temperature: float32 ``[n]``, the temperatures of this step; 0 is greedy.
        own_confidence: float32 ``[n]``, the temperatures of canvases whose algorithm has
            `own_confidence`, see `with_drawn`; None if there is none, or nothing draws.
        adjust: ids int64 ``[n, L]`` and the values to add to their logits (float32 ``[n, L]``), or
            None.
        ask: ids int64 ``[n, L, K]`` whose log-probabilities are needed, or None.
        constraint: what these canvases must follow; None if no request has a constraint.
        masked: bool ``[n, L]``, the only positions whose statistics are read; None for all.
        rows: int64 ``[k]``, the positions, counted over the batch, whose logits exist; None for
            all.
        compile: whether a compiled function updates the canvases.
    """

    batch: Batch
    state: SlotState
    width: torch.Tensor | int
    temperature: torch.Tensor
    own_confidence: torch.Tensor | None = None
    adjust: tuple[torch.Tensor, torch.Tensor] | None = None
    ask: torch.Tensor | None = None
    constraint: ConstrainedStep | None = None
    masked: torch.Tensor | None = None
    rows: torch.Tensor | None = None
    compile: bool = False

    @property
    def slots(self) -> torch.Tensor:
        """See `Batch`."""
        return self.batch.slots

    @property
    def on_host(self) -> np.ndarray:
        """See `Batch`."""
        return self.batch.on_host

    @property
    def draws(self) -> bool:
        """Whether any request of the batch draws."""
        return self.batch.flags["samples"]

    @property
    def needs_rows(self) -> bool:
        """Whether any request of the batch has biases, filters or logprobs."""
        return self.batch.flags["needs_rows"]

    @property
    def may_go_on(self) -> bool:
        """Whether any canvas may be denoised again after this step, as far as the host can tell.

        If not, no soft embedding is needed.
        """
        return self.batch.flags["several_steps"]

    @property
    def needs_logprob(self) -> bool:
        """Whether `Readings.logprob` is needed."""
        return self.draws and self.batch.flags["records"]

    @cached_property
    def status(self) -> SlotStatus:
        """The batch's slots before the update, for what runs uncompiled."""
        return self.state.read(self.slots)

    def masked_rows(self) -> torch.Tensor | None:
        """The rows of masked positions, int64 ``[k]``, at least one; None to read all rows."""
        if self.masked is None:
            return None
        found = self.masked.flatten().nonzero()[:, 0]
        return found if len(found) else torch.zeros(1, dtype=torch.int64)

    def part(self, first: int, end: int) -> StepPlan:
        """The plan of the canvases ``first..end`` of the batch."""
        assert self.rows is None, "rows are counted over the whole batch"
        whole = {field.name: getattr(self, field.name) for field in fields(self)}
        rows = slice(first, end)
        return StepPlan(**{name: _part(value, rows) for name, value in whole.items()})


def _part(value: Any, rows: slice) -> Any:
    """The rows of what a plan has for each canvas; anything else is that of the whole batch."""
    if isinstance(value, torch.Tensor):
        return value[rows]
    if isinstance(value, tuple):
        return tuple(_part(each, rows) for each in value)
    return value.part(rows) if hasattr(value, "part") else value


@dataclass
class Readings:
    """The result of a readout: what it computed from the hidden states of a batch of canvases.

    Attributes:
        statistics: row statistics ``[n, L]``.
        noise: int64 ``[n, L]``, uniform random tokens; None for a masked model.
        next_canvas: int64 ``[n, L]``, the tokens with which the canvases after these begin: uniform
            random tokens, or masks after the token that `readout_shifted` has read. None for other
            masked models, or if not all canvases are L wide.
        soft_embedding: float32 ``[n, L, hidden]``, before the embedding's scale; None for a masked
            model, or if no canvas may go on.
        log_probabilities: float32 ``[n, L, K]``, those of the ids in `StepPlan.ask`, or None.
        logprob: float32 ``[n, L]``, the log-probabilities at temperature 1 of the tokens in
            `statistics`, filters aside. Those of requests with biases or constraints are
            meaningless. None if it is not needed, and for a model of uniform noise.
        likeliest: ``[n, L, K]``, see `Batch.likeliest`; None if it is 0.
    """

    statistics: RowStatistics
    noise: torch.Tensor | None = None
    next_canvas: torch.Tensor | None = None
    soft_embedding: torch.Tensor | None = None
    log_probabilities: torch.Tensor | None = None
    logprob: torch.Tensor | None = None
    likeliest: RankedTokens | None = None

    @property
    def kind(self) -> tuple[Any, ...]:
        """The key by which a compiled function may tell these readings from others."""
        present = (getattr(self, field.name) is None for field in fields(self))
        return type(self.statistics), *present


class Readout(Protocol):
    """Computes `Readings` from hidden states; an engine has one, chosen when it starts.

    Attributes:
        canvases: the number of canvases whose whole rows of logits exist at a time.
        triton: whether Triton kernels compute the row statistics.
    """

    canvases: int
    triton: bool

    def read(self, hidden: torch.Tensor, plan: StepPlan) -> Readings:
        """Return the readings of a batch from its hidden states ``[n * L, hidden]``."""
        ...

    def warm_up(self, hidden: torch.Tensor) -> None:
        """Call every compiled function of a step once, to compile it before the first request.

        All ranks call this together.

        Args:
            hidden: example hidden states, ``[EXAMPLE_ROWS, hidden]``.
        """
        ...


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


@dataclass(frozen=True)
class FollowedPaths:
    """The paths through a batch's canvases that its constraints chose.

    Attributes:
        tokens: int64 ``[n, L]``, the tokens of their paths.
        inside: bool ``[n, L]``, positions that hold the path's token once they are decided.
        feasible: bool ``[n]``, canvases that have a path; one without a constraint always does.
        waits: bool ``[n]``, canvases whose constraint has not been looked up yet, which stay as
            they are; None if there can be none.
    """

    tokens: torch.Tensor
    inside: torch.Tensor
    feasible: torch.Tensor
    waits: torch.Tensor | None

    def kept(self, canvas: Canvas, skips: torch.Tensor) -> Canvas:
        """The canvases after an algorithm's step, with the path's token at decided positions.

        An algorithm may decide a position for another token than the path's, or keep an earlier
        token that is not on this step's path. The canvas would then hold tokens of two paths, and
        there might be no way to complete it. `skips` (bool ``[n]``) are canvases that this pass
        does not denoise.
        """
        follows = self.inside & ~canvas.masked & ~canvas.fixed & (self.feasible & ~skips)[:, None]
        return replace(canvas, tokens=torch.where(follows, self.tokens, canvas.tokens))


class ConstrainedStep(Protocol):
    """The constraints of the canvases of a step, those without a constraint among them."""

    def part(self, rows: slice) -> ConstrainedStep:
        """The constraint of a slice of the canvases; its chosen paths are stored in the whole."""
        ...

    def choose_paths(self, chosen: Any, plan: StepPlan) -> None:
        """Replace the tokens in `MaskedRows` or `NoiseRows` with those of paths."""
        ...

    def choose_noise_paths(self, *arguments: Any) -> SampledStatistics:
        """See `engine.constraints.ConstrainedStep`."""
        ...

    def followed(self) -> FollowedPaths:
        """The paths that were chosen."""
        ...

    def advance(self, out: torch.Tensor, leaves: torch.Tensor) -> None:
        """Move on after a step; arguments are those of `StepOutcome`."""
        ...


@dataclass(frozen=True)
class StepOutcome:
    """The batch after the update. Tensors are bool ``[n]`` unless another type is given.

    Attributes:
        canvas: the updated canvases, ``[n, L]``.
        shown: int64 ``[n, L]``, the tokens of `canvas`; for a commit, the tokens that the model has
            read, even if the algorithm would change them.
        state: for each algorithm of the batch, the tensors that it keeps for its next step.
        ready: int64 ``[n]``, length of the prefix that may leave; 0 while there is none.
        skips_denoise: this pass did not denoise the canvas, which is committed or waits.
        ready_to_leave: a prefix may leave, and it need not wait for other canvases.
        leaves: a prefix leaves in this step, and the slot starts its next canvas.
        begins: the slot's next pass is the first of a canvas: of the next canvas if this one
            leaves, or of the same canvas if it has waited for its constraint.
        advances: the canvas leaves, and its keys and values are final, so the cache advances past
            it; with fused commits they may still have to be written.
        flags: int64 ``[n]``, what is reported to the scheduler about the pass, `PassFlags`.
        out: int64 ``[n]``, length of the prefix that has been output after this step.
    """

    canvas: Canvas
    shown: torch.Tensor
    state: list[Mapping[str, torch.Tensor]]
    ready: torch.Tensor
    skips_denoise: torch.Tensor
    ready_to_leave: torch.Tensor
    leaves: torch.Tensor
    begins: torch.Tensor
    advances: torch.Tensor
    flags: torch.Tensor
    out: torch.Tensor

    def goes_on(self) -> torch.Tensor:
        """Canvases that are denoised further, bool ``[n]``."""
        return ~(self.ready_to_leave | self.begins)


class StepObserver(Protocol):
    """Sees the decisions of steps, and adds to the output of the requests that ask for it."""

    def observe(
        self, plan: StepPlan, outcome: StepOutcome, decided: torch.Tensor, readings: Readings
    ) -> None:
        """See a step before the slots are written.

        `decided` is bool ``[n, L]``, the positions whose token was chosen in it.
        """
        ...

    def add_to(
        self,
        logprobs: Any,
        slots: torch.Tensor,
        on_host: np.ndarray,
        num_sampled: torch.Tensor,
        first: torch.Tensor,
    ) -> Any:
        """Add what was seen to vLLM's ``LogprobsTensors`` of the batch, or None.

        `first` is int64 ``[n]``, the positions in the canvases where the tokens that leave begin.
        """
        ...
