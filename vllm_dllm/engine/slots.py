"""The state of all slots: one slot for each running request, in tensors that are allocated once.

Everything that belongs to a request and changes from step to step is stored here, on the device,
and updated in place: its canvas, its progress, and the tensors of its decoding algorithm. A slot is
one row of integers and one of flags. A request enters with one copy into each, and a step reads and
writes the rows of its batch with one operator each, because every operator costs a GPU a kernel.

State that only some requests need (constraints, biases, logprobs, records) is kept in
`engine.optional_parts`. A few flags here, on the host, say which of those parts a batch needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import torch

from vllm_dllm.decoding import Algorithm, Canvas, EditTokens
from vllm_dllm.decoding.base import DrawConfidence
from vllm_dllm.engine.to_device import copy_into, to_device
from vllm_dllm.ranges import AlgorithmConfig
from vllm_dllm.settings.resolution import ResolvedDecoding
from vllm_dllm.vllm_seams.channels import Failure

# How many of a request's end-of-sequence ids can finish a block early. At others a request still
# stops, because vLLM's scheduler checks them all, but its blocks do not finish early.
MAX_END_TOKENS = 8
NO_TOKEN = -1


class Phase(IntEnum):
    """The purpose of the next forward pass over a slot's canvas."""

    PREFILL = 0  # the pass computes chunks of the prompt; the canvas waits
    DENOISE = 1  # the pass changes the canvas and keeps nothing in the KV cache
    COMMIT = 2  # the pass runs over the final canvas; keys and values stay, and the tokens leave


@dataclass(frozen=True)
class CanvasKind:
    """The properties of a model's canvases."""

    length: int  # L, the number of positions; of all blocks, where there are several
    vocabulary: int  # number of token ids
    mask_token: int | None  # the token that fills a fresh canvas; None for uniform random tokens
    # Whether blocks begin at absolute multiples of their length, so that the prompt's last
    # ``len(prompt) % block_length`` tokens are the first canvas' fixed positions; otherwise the
    # first canvas begins directly after the prompt.
    aligned: bool
    edit_tokens: EditTokens | None = None  # with which the model changes the layout of a canvas
    # `shifted` and `blocks` need masks, and `blocks` aligned ones.
    shifted: bool = False  # position i is read at row i - 1, see `Family.shifted`
    blocks: int = 1  # how many blocks a canvas holds, see `decoding.blocks`
    opens_at: float | None = None  # see `DllmSettings.blocks_open_at`
    draw_confidence: DrawConfidence | None = None  # see `Family.draw_confidence`

    @property
    def block_length(self) -> int:
        """The number of positions of a block."""
        return self.length // self.blocks

    @property
    def is_cut(self) -> bool:
        """Whether the end of the context may cut a canvas."""
        return self.blocks > 1 or not self.aligned


# The columns of a slot's integers and flags before those of its canvas, see `NamedColumns`: None
# for one column, else how many. A step changes those in `CHANGING`, which come last. What
# `configure` writes is adjacent, so that it is one copy.
CHANGING = ("remaining", "start", "tail", "ready", "step", "phase")
INTEGERS: dict[str, int | None] = {
    **dict.fromkeys(("seed", "after_prefill", "max_steps", "schedule_steps", "blocks")),
    "end_tokens": MAX_END_TOKENS,
    **dict.fromkeys(CHANGING),
}
FLAGS: dict[str, int | None] = dict.fromkeys(("read_only", "streams", "whole", "edits"))
# What a request asks of its steps, on the host: bool [slots] each.
HOST_FLAGS = (
    "samples",  # its temperature is above 0
    "several_steps",  # `max_steps` is above 1
    "may_stream",  # `streams`
    "records",  # every pass over its canvases is recorded
    "constrained",  # it follows a constraint
    "needs_rows",  # it has options that change or read whole rows of logits
    "reports",  # logprobs of its tokens are read
    "verifies",  # the attribute of its algorithm
)


class Columns:
    """The names of a matrix' `count` columns, in order.

    `at` says where a name's columns are, and `first` is the number of the first of them.
    """

    def __init__(self, widths: Mapping[str, int | None]) -> None:
        """Name the columns; a name has this number of them, or one if that is None."""
        self.at: dict[str, int | slice] = {}
        self.first: dict[str, int] = {}
        self.count = 0
        for name, width in widths.items():
            self.first[name] = first = self.count
            self.count += 1 if width is None else width
            self.at[name] = first if width is None else slice(first, self.count)

    def on_host(self, dtype: type, **values: Any) -> np.ndarray:
        """One row on the host, ``[count]``, with 0 for names that are not given."""
        row: np.ndarray = np.zeros(self.count, dtype=dtype)
        for name, value in values.items():
            row[self.at[name]] = value
        return row


_INTEGERS, _FLAGS = Columns(INTEGERS), Columns(FLAGS)


class Column:
    """A column ``[rows]`` of integers or flags, by the name of the attribute."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.matrix = "integers" if name in INTEGERS else "flags"
        self.at = (_INTEGERS if name in INTEGERS else _FLAGS).at[name]

    def __get__(self, named: Any, owner: type | None = None) -> torch.Tensor:
        rows: torch.Tensor = getattr(named, self.matrix)
        return rows[:, self.at]


class NamedColumns:
    """The names of the columns in rows of integers (int64) and of flags (bool)."""

    seed = Column()  # of all random numbers of the request
    phase = Column()  # a `Phase`
    # The phase that follows the prompt: `Phase.DENOISE`, or what an interrupted canvas had reached.
    after_prefill = Column()
    start = Column()  # absolute position of the canvas' first position
    # How many positions at the start of the canvas vLLM already counts as tokens: those of the
    # prompt and, with `streams`, those that have been output.
    tail = Column()
    ready = Column()  # length of the canvas prefix that leaves at the commit
    remaining = Column()  # tokens that the request may still output
    step = Column()  # denoise steps that the canvas has taken
    max_steps = Column()  # the cap on `step`
    schedule_steps = Column()  # steps that a temperature schedule is spread over
    blocks = Column()  # how many unfinished blocks of the canvas may be open
    end_tokens = Column()  # [rows, MAX_END_TOKENS], padded with `NO_TOKEN`
    read_only = Column()  # the canvas leaves without a commit and ends the request
    streams = Column()  # the decided beginning of a canvas leaves before the canvas is finished
    whole = Column()  # a canvas leaves when all its positions are decided, not when its answer is
    edits = Column()  # the attribute of its algorithm


@dataclass(frozen=True)
class SlotStatus(NamedColumns):
    """Copies of the rows of a batch's slots before a step, in batch order."""

    integers: torch.Tensor  # [n, columns]
    flags: torch.Tensor  # [n, columns]
    temperature: torch.Tensor  # float32 [n]
    canvas: Canvas  # [n, L]


class AlgorithmSlots:
    """One algorithm's tensors for all slots; rows of slots with other algorithms are ignored."""

    def __init__(self, algorithm: Algorithm, slots: int, length: int, device: torch.device) -> None:
        """Allocate the tensors for this number of slots."""
        self.algorithm = algorithm
        self.names = tuple(algorithm.config.ranges())  # of its settings
        self.parameters = torch.zeros((slots, len(self.names)), device=device)
        self.state = {}  # by name, see `StateTensor`
        for name, spec in algorithm.state.items():
            shape = (slots, *([length] if spec.per_position else []), *spec.extra)
            self.state[name] = torch.zeros(shape, dtype=spec.dtype, device=device)

    def enter(self, slot: int, settings: AlgorithmConfig) -> None:
        """Set the parameters of the request that enters ``slot``."""
        values = settings.values()
        row: np.ndarray = np.array([values[name] for name in self.names], dtype=np.float32)
        copy_into(self.parameters[slot], row)


@dataclass(frozen=True)
class AlgorithmBatch:
    """The canvases of a batch that share an algorithm."""

    all_slots: AlgorithmSlots  # the algorithm's tensors for all slots
    index: torch.Tensor | None  # int64 [m], their positions in the batch; None for all of it
    slots: torch.Tensor  # int64 [m]

    @property
    def shape_id(self) -> str:
        """See `ops.compiled.any_size`."""
        return "batch" if self.index is None else "algorithm"

    @property
    def algorithm(self) -> Algorithm:
        """The decoding rule."""
        return self.all_slots.algorithm

    def parameters(self) -> Mapping[str, torch.Tensor]:
        """Copy the algorithm's settings of these canvases: by name, float32 ``[m]`` each."""
        values = self.all_slots.parameters.index_select(0, self.slots)
        return dict(zip(self.all_slots.names, values.unbind(1), strict=True))

    def state(self, step: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """The algorithm's tensors of these canvases: by name, ``[m, ...]`` each.

        They have their initial values where a canvas has taken 0 steps, int64 ``[m]``.
        """
        state = {}
        for name, spec in self.algorithm.state.items():
            kept = self.all_slots.state[name].index_select(0, self.slots)
            begins = (step == 0).view(-1, *[1] * (kept.ndim - 1))
            state[name] = kept.masked_fill(begins, spec.initial)
        return state

    def keep(self, state: Mapping[str, torch.Tensor]) -> None:
        """Store the tensors that a step returned, ``[m, ...]`` each."""
        for name in self.algorithm.state:
            self.all_slots.state[name].index_copy_(0, self.slots, state[name])


class AlgorithmStates:
    """The tensors of every algorithm that any request has used so far."""

    def __init__(self, kind: CanvasKind, device: torch.device, which: np.ndarray) -> None:
        # By the algorithm's name, in the order in which they were first used.
        self.by_name: dict[str, AlgorithmSlots] = {}
        self._kind = kind
        self._device = device
        self.which = which  # uint8 [slots], the position of each slot's algorithm in `by_name`

    def enter(self, slot: int, algorithm: Algorithm, settings: AlgorithmConfig) -> None:
        """Set up ``slot`` for a request; allocates the algorithm's tensors at its first use."""
        name = algorithm.name
        if name not in self.by_name:
            if self._kind.blocks > 1:
                from vllm_dllm.decoding.blocks import InBlocks

                algorithm = InBlocks(algorithm, self._kind.blocks, self._kind.opens_at)
            shape = len(self.which), self._kind.length
            self.by_name[name] = AlgorithmSlots(algorithm, *shape, self._device)
        self.by_name[name].enter(slot, settings)
        self.which[slot] = list(self.by_name).index(name)

    def for_slot(self, slot: int) -> AlgorithmSlots:
        """Return the tensors of the algorithm that decodes the request in ``slot``."""
        return list(self.by_name.values())[self.which[slot]]

    def batches(self, slots: torch.Tensor, on_host: np.ndarray) -> list[AlgorithmBatch]:
        """Group the slots of a batch (int64 ``[n]``, and the same on the host) by algorithm."""
        which = self.which[on_host]
        algorithms = list(self.by_name.values())
        if (which == which[0]).all():  # most batches have one algorithm
            return [AlgorithmBatch(algorithms[which[0]], None, slots)]
        batches = []
        for number in np.unique(which):
            index = to_device(np.flatnonzero(which == number), self._device)
            own = slots.index_select(0, index)
            batches.append(AlgorithmBatch(algorithms[number], index, own))
        return batches


class SlotState(NamedColumns):
    """The slots' tensors ``[slots, ...]``, indexed by vLLM's request index.

    The columns of `Canvas`, ``[slots, L]``, follow those of `NamedColumns`.
    """

    tokens: torch.Tensor
    masked: torch.Tensor
    fixed: torch.Tensor
    samples: np.ndarray
    several_steps: np.ndarray
    may_stream: np.ndarray
    records: np.ndarray
    constrained: np.ndarray
    needs_rows: np.ndarray
    reports: np.ndarray
    verifies: np.ndarray

    def __init__(self, slots: int, kind: CanvasKind, device: torch.device) -> None:
        self.kind = kind
        self.length = length = kind.length
        self.device = device
        self._integers = Columns(INTEGERS | {"tokens": length})
        self._flags = Columns(FLAGS | {"masked": length, "fixed": length})
        self.integers = torch.zeros((slots, self._integers.count), dtype=torch.int64, device=device)
        self.flags = torch.zeros((slots, self._flags.count), dtype=torch.bool, device=device)
        for columns, rows in (self._integers, self.integers), (self._flags, self.flags):
            vars(self).update({name: rows[:, at] for name, at in columns.at.items()})
        self.tokens.fill_(kind.mask_token or 0)
        self.masked.fill_(kind.mask_token is not None)
        self.end_tokens.fill_(NO_TOKEN)
        for name in ("after_prefill", "max_steps", "schedule_steps", "blocks"):
            getattr(self, name).fill_(1)
        self.temperature = torch.zeros(slots, device=device)
        self.position = torch.arange(length, device=device)
        # On the host, the columns of `HOST_FLAGS`, and `AlgorithmStates.which`.
        self.on_host: np.ndarray = np.zeros((slots, len(HOST_FLAGS) + 1), dtype=np.uint8)
        vars(self).update(zip(HOST_FLAGS, self.on_host[:, :-1].view(np.bool_).T, strict=True))
        self.algorithms = AlgorithmStates(kind, device, self.on_host[:, -1])
        self.several_steps[:] = True  # updates are compiled before any request has entered
        # [slots, positions], every token of the requests; the sampler sets vLLM's own tensor.
        self.history = torch.zeros((0, 0), dtype=torch.int32, device=device)
        # Whether the last pass over the canvas met NaN or infinities.
        self.spoiled = torch.zeros(slots, dtype=torch.bool, device=device)
        # A `Failure` if the request fails because of its own parameters, else 0.
        self.failure = torch.zeros(slots, dtype=torch.int32, device=device)

    def enter(self, slot: int, prompt: Sequence[int], seed: int, reread: int = 0) -> None:
        """Set up ``slot`` for a new request: lay out its first canvas after the prompt.

        Where canvases are not aligned, the first one begins with the last `reread` prompt tokens.
        If positions are read at the row before, the end of a prompt without a tail is committed
        once more, its last block or, where canvases are not aligned, its last token: the last of
        its rows in that pass predicts the answer's first token.
        `configure` follows, and sets what this leaves at 0.
        """
        tail = len(prompt) % self.kind.block_length if self.kind.aligned else reread
        again = self.kind.shifted and not tail
        if again:
            tail = self.length if self.kind.aligned else 1
        start = len(prompt) - tail
        canvas = self._fresh_on_host(seed, start)
        canvas[:tail] = prompt[start:]
        integers = self._integers.on_host(
            np.int64,
            seed=seed,
            after_prefill=int(Phase.COMMIT if again else Phase.DENOISE),
            start=start,
            tail=tail,
            ready=tail if again else 0,
            phase=int(Phase.PREFILL),
            tokens=canvas,
        )
        is_tail = np.arange(self.length) < tail
        masked = ~is_tail & (self.kind.mask_token is not None and not again)
        copy_into(self.integers[slot], integers)
        copy_into(self.flags[slot], self._flags.on_host(np.bool_, masked=masked, fixed=is_tail))
        self.spoiled[slot].fill_(False)
        self.failure[slot].fill_(int(Failure.NONE))

    def configure(
        self,
        slot: int,
        choice: ResolvedDecoding,
        temperature: float,
        tokens: int,
        ends: Iterable[int] = (),
        *,
        read_only: bool = False,
        streams: bool = False,
        records: bool = False,
        whole: bool = False,
    ) -> None:
        """Store how the request in ``slot`` is decoded, when it ends, and how its output leaves.

        It may output `tokens` more tokens, and the ids in `ends` end it.
        """
        end_tokens: np.ndarray = np.full(MAX_END_TOKENS, NO_TOKEN)
        ids = sorted(set(ends))[:MAX_END_TOKENS]
        end_tokens[: len(ids)] = ids
        integers = self._integers.on_host(
            np.int64,
            max_steps=choice.max_steps,
            schedule_steps=choice.schedule_steps,
            blocks=choice.blocks,
            end_tokens=end_tokens,
            remaining=tokens,
        )
        own = slice(self._integers.first["max_steps"], self._integers.first["start"])
        copy_into(self.integers[slot, own], integers[own])
        flags = np.array([read_only, streams, whole, choice.algorithm.edits])
        copy_into(self.flags[slot, : len(flags)], flags)
        self.temperature[slot].fill_(temperature)
        self.algorithms.enter(slot, choice.algorithm, choice.settings)
        self.samples[slot] = temperature > 0
        self.several_steps[slot] = choice.max_steps > 1
        self.may_stream[slot] = streams
        self.records[slot] = records
        self.verifies[slot] = choice.algorithm.verifies

    def asked(self, on_host: np.ndarray) -> dict[str, bool]:
        """Which of `HOST_FLAGS` any of these slots (int ``[n]``) has."""
        found = np.logical_or.reduce(self.on_host[on_host, :-1]).tolist()
        return dict(zip(HOST_FLAGS, found, strict=True))

    def read(self, slots: torch.Tensor) -> SlotStatus:
        """Copy the rows of ``slots`` (int64 ``[n]``), and name their columns."""
        integers, flags = (of.index_select(0, slots) for of in (self.integers, self.flags))
        canvas = Canvas(
            integers[:, self._integers.at["tokens"]],
            flags[:, self._flags.at["masked"]],
            flags[:, self._flags.at["fixed"]],
        )
        return SlotStatus(integers, flags, self.temperature.index_select(0, slots), canvas)

    def fail(self, slots: torch.Tensor, where: torch.Tensor, failure: Failure) -> None:
        """Let requests in ``slots`` (int64 ``[n]``) fail where `where` (bool ``[n]``) is true."""
        marked = self.failure.index_select(0, slots).masked_fill(where, int(failure))
        self.failure.index_copy_(0, slots, marked)

    def finished_end(self, slots: torch.Tensor) -> torch.Tensor:
        """Where the finished blocks at the start of canvases end, int64 ``[n]``, like `slots`."""
        masked = self.masked.index_select(0, slots).unflatten(1, (self.kind.blocks, -1))
        return (~masked.any(2)).long().cumprod(1).sum(1) * self.kind.block_length

    def seed_canvas(self, slot: int, tokens: Sequence[int], pinned: Sequence[int]) -> None:
        """Start the canvas in ``slot`` from these tokens, and fix those at `pinned` positions."""
        copy_into(self.tokens[slot, : len(tokens)], np.array(tokens, dtype=np.int64))
        if pinned:
            is_pinned: np.ndarray = np.zeros(self.length, dtype=bool)
            is_pinned[list(pinned)] = True
            self.fixed[slot].logical_or_(to_device(is_pinned, self.device))

    def _fresh_on_host(self, seed: int, start: int) -> np.ndarray:
        """`_fresh` of one canvas, int64 ``[L]``: the same numbers, which cost a GPU no kernels."""
        if self.kind.mask_token is not None:
            return np.full(self.length, self.kind.mask_token)
        position = torch.arange(self.length)
        return self._fresh(torch.tensor([seed]), torch.tensor([start]), position)[0].numpy()

    def _fresh(
        self, seed: torch.Tensor, start: torch.Tensor, position: torch.Tensor
    ) -> torch.Tensor:
        """The tokens of fresh canvases, int64 ``[n, L]``, for seeds and starts int64 ``[n]``.

        `position` is int64 ``0..L``, and a tensor in memory: a product of an `arange` would become
        one of the compiler's indices, and in C++ what follows an overflow of these is undefined.
        """
        if self.kind.mask_token is not None:
            return torch.full((len(seed), self.length), self.kind.mask_token, device=seed.device)
        from vllm_dllm.ops.noise.keyed import Stream, row_keys, uniform_tokens

        keys = row_keys(seed, start, Stream.CANVAS)
        return uniform_tokens(keys, position, self.kind.vocabulary)

    def advance(
        self,
        slots: torch.Tensor,
        now: SlotStatus,
        after: Canvas,
        leaves: torch.Tensor,
        moves: torch.Tensor | int,
        fresh: torch.Tensor | None = None,
        **progress: torch.Tensor,
    ) -> torch.Tensor:
        """Store what a step has updated, and return the tokens to read next, int64 ``[n, L]``.

        `now` are the rows of the slots before the step, and `after` the updated canvases. Where
        `leaves` (bool ``[n]``) is true, a new canvas begins after what `moves` (see
        `StepPlan.moves`), with the tokens in `fresh` (int64 ``[n, L]``) if they are known already.
        `progress` has the values of the other columns in `CHANGING`.
        """
        replaced, start = leaves[:, None], now.start + leaves * moves
        if fresh is None:
            fresh = self._fresh(now.seed, start, self.position)
        tokens = torch.where(replaced, fresh, after.tokens)
        masked = after.masked
        if self.kind.shifted:  # the commit has predicted the first token of the next canvas
            masked = masked | (replaced & (self.position > 0))
        elif self.kind.mask_token is not None:
            masked = masked | replaced
        numbers = progress | {"start": start}
        constant = now.integers[:, : self._integers.first[CHANGING[0]]]
        changed = torch.stack([numbers[name] for name in CHANGING], 1)
        self.integers.index_copy_(0, slots, torch.cat([constant, changed, tokens], 1))
        flags = [now.flags[:, : len(FLAGS)], masked, after.fixed & ~replaced]
        self.flags.index_copy_(0, slots, torch.cat(flags, 1))
        return tokens
