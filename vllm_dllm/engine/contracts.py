"""The records that the parts of a step hand to each other, and the protocols of optional parts.

`step` plans and decides, a readout reads, `sampler` reports. None of them imports an optional part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import torch

from vllm_dllm.decoding import Algorithm, Canvas
from vllm_dllm.engine.slots import AlgorithmBatch, SlotState, SlotStatus
from vllm_dllm.ops.statistics.rows import RankedTokens, RowStatistics, SampledStatistics

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.sample.output import SamplerOutput

    from vllm_dllm.engine.constraints import ConstrainedStep

# The number of rows in the examples used to compile functions ahead of time. The compiler lays out
# its loops for that size, which is a few canvases; compiled functions accept any number of rows.
EXAMPLE_ROWS = 128

MaybeTensor = TypeVar("MaybeTensor", "torch.Tensor", "torch.Tensor | None")


@dataclass(frozen=True)
class CommitPolicy:
    """When a canvas leaves: its tokens are output, and its slot starts the next one."""

    sync: bool  # a finished canvas waits until all canvases of the batch are finished
    early: bool  # a canvas may leave before all its positions are decided, see `emitted_length`
    skip_last_commit: bool  # the last canvas of a request leaves without a commit
    # A denoise pass over a final canvas counts as a commit, because the model reads both with the
    # same mask and the same input.
    in_place: bool
    # A canvas leaves before its commit, and the commit shares a forward pass with the next canvas.
    fused: bool = False
    # That is one pass, for which the scheduler grants 2 L tokens; otherwise every pass over the
    # next canvas repeats the commit.
    granted: bool = False


@dataclass(frozen=True)
class Batch:
    """The part of a step that stays the same as long as its requests do."""

    slots: torch.Tensor  # int64 [n]
    on_host: np.ndarray  # the same as a numpy array
    flags: Mapping[str, bool]  # see `SlotState.asked`
    by_algorithm: Sequence[AlgorithmBatch] = ()  # empty for a part of a batch
    observers: Sequence[StepObserver] = ()  # of the decisions of its steps; empty for a part
    entropy: bool = False  # whether entropies are needed
    likeliest: int = 0  # how many of the likeliest tokens of each position are needed; 0 for none
    reads_masked: bool = False  # whether only masked positions are read

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
        parts = [(each.slots, getattr(each.algorithm, flag)) for each in self.by_algorithm]
        return self.in_order([torch.full_like(s, has, dtype=torch.bool) for s, has in parts])

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
    """The batch before a step, and what must be read from the model's output for it."""

    batch: Batch  # the requests
    state: SlotState  # the engine's slots
    width: torch.Tensor | int  # number of positions of each canvas, int64 [n], or L for all of them
    temperature: torch.Tensor  # float32 [n], the temperatures of this step; 0 is greedy
    # float32 [n], the temperatures of canvases whose algorithm has `own_confidence`, see
    # `with_drawn`; None if there is none, or nothing draws.
    own_confidence: torch.Tensor | None = None
    # int64 [n, L], ids, and float32 [n, L], what to add to their logits.
    adjust: tuple[torch.Tensor, torch.Tensor] | None = None
    ask: torch.Tensor | None = None  # int64 [n, L, K], ids whose log-probabilities are needed
    constraint: ConstrainedStep | None = None  # None if no request has a constraint
    masked: torch.Tensor | None = None  # bool [n, L], what statistics are read of; None for all
    rows: torch.Tensor | None = None  # int64 [k], the rows [n * L] whose logits exist; None for all
    compile: bool = False  # whether compiled functions update the canvases
    at_once: bool = False  # whether that is one function, `DiffusionSampler.finish`

    @property
    def slots(self) -> torch.Tensor:
        """See `Batch`."""
        return self.batch.slots

    @property
    def on_host(self) -> np.ndarray:
        """See `Batch`."""
        return self.batch.on_host

    def moves(self, now: SlotStatus) -> torch.Tensor | int:
        """How many positions of each canvas stay when it leaves: all, or a prompt's last token."""
        kind = self.state.kind
        if kind.aligned or not kind.shifted:
            return self.width
        return torch.where(now.tail > 0, now.tail, self.width)

    @property
    def draws(self) -> bool:
        """Whether any request of the batch draws."""
        return self.batch.flags["samples"]

    @property
    def needs_rows(self) -> bool:
        """Whether any request of the batch has biases, filters or logprobs."""
        return self.batch.flags["needs_rows"]

    @property
    def reads_logits(self) -> bool:
        """Whether an algorithm reads logits, and not statistics alone."""
        return self.ask is not None or self.batch.likeliest > 0

    @property
    def in_parts(self) -> bool:
        """Whether compiled functions update the canvases that are the same for any algorithms."""
        return self.compile and not self.at_once

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
    """The result of a readout: what it computed from the hidden states of a batch of canvases."""

    statistics: RowStatistics  # row statistics [n, L]
    noise: torch.Tensor | None = None  # int64 [n, L], random tokens; None for a masked model
    # int64 [n, L], the tokens with which the canvases after these begin: uniform random tokens,
    # or masks after the token that `ShiftedReadout` has read. None for other masked models, or if
    # `StepPlan.width` is a tensor.
    next_canvas: torch.Tensor | None = None
    # float32 [n, L, hidden], before the embedding's scale; None for a masked model, or if no
    # canvas may go on.
    soft_embedding: torch.Tensor | None = None
    log_probabilities: torch.Tensor | None = None  # float32 [n, L, K], of the ids in `StepPlan.ask`
    # float32 [n, L], the log-probabilities at temperature 1 of the tokens in `statistics`,
    # filters aside. Those of requests with biases or constraints are meaningless. None if it is not
    # needed, and for a model of uniform noise.
    logprob: torch.Tensor | None = None
    likeliest: RankedTokens | None = None  # [n, L, K], see `Batch.likeliest`; None if it is 0

    @property
    def kind(self) -> tuple[Any, ...]:
        """The key by which a compiled function may tell these readings from others."""
        present = (getattr(self, field.name) is None for field in fields(self))
        return type(self.statistics), *present

    def common(self, entropy: bool = False) -> Readings:
        """What every batch has of these, as a compiled function takes them, perhaps entropies."""
        found = self.statistics
        if not (entropy or isinstance(found, SampledStatistics)):
            found = RowStatistics(found.token, found.probability)
        return Readings(found, self.noise, self.next_canvas, self.soft_embedding)


class Readout(Protocol):
    """Computes `Readings` from hidden states; an engine has one, chosen when it starts."""

    canvases: int  # the number of canvases whose whole rows of logits exist at a time
    triton: bool  # whether Triton kernels compute the row statistics

    def read(self, hidden: torch.Tensor, plan: StepPlan) -> Readings:
        """Return the readings of a batch from its hidden states ``[n * L, hidden]``."""

    def warm_up(self, hidden: torch.Tensor) -> None:
        """Compile every function of a step with hidden states ``[EXAMPLE_ROWS, hidden]``.

        All ranks call this together.
        """


@dataclass
class MaskedRows:
    """The choice of a masked model from the rows of n canvases, ``n * L`` positions."""

    statistics: RowStatistics  # [rows], with drawn tokens and those of paths
    greedy: RowStatistics  # [rows], the statistics as if no request drew
    logits: torch.Tensor  # [rows, ids], the biased logits
    logprob: torch.Tensor | None  # float32 [rows], see `Readings`
    # The next three are None if no request draws.
    tempered: torch.Tensor | None = None  # [rows, ids], logits divided by the temperature
    filtered: torch.Tensor | None = None  # the same with -inf for tokens that filters exclude
    keys: torch.Tensor | None = None  # int64 [n, L], the keys of the random numbers
    share: torch.Tensor | None = None  # float32 [rows], see `with_drawn`
    # int64 [n, L], the row of each position in these logits, or -1 if it was not read; None if
    # every position has its own.
    place: torch.Tensor | None = None


@dataclass(frozen=True)
class FollowedPaths:
    """The paths through a batch's canvases that its constraints chose."""

    tokens: torch.Tensor  # int64 [n, L], the tokens of their paths
    inside: torch.Tensor  # bool [n, L], positions that hold the path's token once they are decided
    feasible: torch.Tensor  # bool [n], canvases that have a path, or no constraint
    # bool [n], canvases that stay as they are until their constraint is looked up; None if none.
    waits: torch.Tensor | None

    def kept(self, canvas: Canvas, skips: torch.Tensor) -> Canvas:
        """The canvases after an algorithm's step, with the path's token at decided positions.

        With tokens of two paths, as an algorithm may decide, there might be no way to complete a
        canvas. `skips` (bool ``[n]``) are canvases that this pass does not denoise.
        """
        follows = self.inside & ~canvas.masked & ~canvas.fixed & (self.feasible & ~skips)[:, None]
        return replace(canvas, tokens=torch.where(follows, self.tokens, canvas.tokens))


@dataclass(frozen=True)
class StepOutcome:
    """The batch after the update. Tensors are bool ``[n]`` unless another type is given."""

    canvas: Canvas  # the updated canvases, [n, L]
    # int64 [n, L], the tokens of `canvas`; for a commit, the tokens that the model has read,
    # even if the algorithm would change them.
    shown: torch.Tensor
    decided: torch.Tensor  # bool [n, L], the positions whose token was chosen in this step
    ready: torch.Tensor  # int64 [n], length of the prefix that may leave; 0 while there is none
    skips_denoise: torch.Tensor  # this pass did not denoise the canvas, which is committed or waits
    ready_to_leave: torch.Tensor  # a prefix may leave, and it need not wait for other canvases
    leaves: torch.Tensor  # a prefix leaves in this step, and the slot starts its next canvas
    # The slot's next pass is the first of a canvas: of the next canvas if this one leaves, or of
    # the same canvas if it has waited for its constraint.
    begins: torch.Tensor
    # The canvas leaves, and its keys and values are final, so the cache advances past it; with
    # fused commits they may still have to be written.
    advances: torch.Tensor
    flags: torch.Tensor  # int64 [n], what is reported to the scheduler about the pass, `PassFlags`
    out: torch.Tensor  # int64 [n], length of the prefix that has been output after this step

    def goes_on(self) -> torch.Tensor:
        """Canvases that are denoised further, bool ``[n]``."""
        return ~(self.ready_to_leave | self.begins)


class StepObserver(Protocol):
    """Sees the decisions of steps, for `OptionalParts.reported`."""

    def observe(self, plan: StepPlan, outcome: StepOutcome, readings: Readings) -> None:
        """See a step before the slots are written."""


class LaterPasses(Protocol):
    """Takes the passes of a step after the first one."""

    def take(self, batch: Batch, output: SamplerOutput) -> SamplerOutput:
        """See `further_passes.FurtherPasses.take`."""
