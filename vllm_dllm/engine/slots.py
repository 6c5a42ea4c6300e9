"""The state of all slots: one slot for each running request, in tensors that are allocated once.

Everything that belongs to a request and changes from step to step is stored here, on the device,
and updated in place: its canvas, its progress, and the tensors of its decoding algorithm. Phases
and masks are explicit; they are never derived from token ids.

State that only some requests need (constraints, biases, logprobs, records) is kept in
`engine.optional_parts`. A few flags here, on the host, say which of those parts a batch needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_dllm.decoding import Algorithm, Canvas
from vllm_dllm.engine.to_device import can_pin, to_device
from vllm_dllm.ranges import AlgorithmConfig
from vllm_dllm.settings.resolution import ResolvedDecoding
from vllm_dllm.vllm_seams.channels import Failure

if TYPE_CHECKING:
    from vllm_dllm.engine.two_block_window import TwoBlockWindow


# How many of a request's end-of-sequence ids can finish a block early. A request with more ids
# still stops at each of them, because vLLM's scheduler checks them all, but its blocks do not
# finish early at the others.
MAX_END_TOKENS = 8
NO_TOKEN = -1


class Phase(IntEnum):
    """What the next forward pass over a slot's canvas is for."""

    PREFILL = 0  # the pass computes chunks of the prompt; the canvas waits
    DENOISE = 1  # the pass changes the canvas and keeps nothing in the KV cache
    COMMIT = 2  # the pass runs over the final canvas; keys and values stay, and the tokens leave


@dataclass(frozen=True)
class CanvasKind:
    """The properties of a model's canvases.

    Attributes:
        length: L, the number of positions.
        vocabulary: number of token ids.
        mask_token: the token that fills a fresh canvas; None for uniform random tokens.
        aligned: canvases begin at absolute multiples of L, so that the prompt's last
            ``len(prompt) % L`` tokens are the first canvas' fixed positions; otherwise
            the first canvas begins directly after the prompt.
    """

    length: int
    vocabulary: int
    mask_token: int | None
    aligned: bool


@dataclass(frozen=True)
class SlotStatus:
    """The progress of a batch's requests before a step, in batch order.

    The fields are copies of the rows of `SlotState`'s tensors of the same names: ``[n]`` for
    ``[slots]``.
    """

    phase: torch.Tensor
    tail: torch.Tensor
    ready: torch.Tensor
    remaining: torch.Tensor
    step: torch.Tensor
    max_steps: torch.Tensor
    schedule_steps: torch.Tensor
    temperature: torch.Tensor
    read_only: torch.Tensor
    end_tokens: torch.Tensor


STATUS = tuple(f.name for f in fields(SlotStatus))


class AlgorithmSlots:
    """One algorithm's tensors for all slots. The rows of slots with other algorithms are ignored.

    Attributes:
        algorithm: the decoding rule.
        parameters: the algorithm's settings by name, float32 ``[slots]`` each.
        state: the algorithm's tensors between steps by name, see `StateTensor`.
    """

    def __init__(self, algorithm: Algorithm, slots: int, length: int, device: torch.device) -> None:
        """Allocate the tensors for this number of slots, filled with their initial values."""
        self.algorithm = algorithm
        self.parameters = {
            name: torch.zeros(slots, device=device) for name in algorithm.config.ranges()
        }
        self.state = {}
        for name, spec in algorithm.state.items():
            shape = (slots, *([length] if spec.per_position else []), *spec.extra)
            self.state[name] = torch.full(shape, spec.initial, dtype=spec.dtype, device=device)

    def enter(self, slot: int, settings: AlgorithmConfig) -> None:
        """Set the parameters and the initial state of the request that enters ``slot``."""
        for name, value in settings.values().items():
            self.parameters[name][slot].fill_(float(value))
        for name, spec in self.algorithm.state.items():
            self.state[name][slot].fill_(spec.initial)

    def keep(
        self, slots: torch.Tensor, new: Mapping[str, torch.Tensor], leaves: torch.Tensor
    ) -> None:
        """Store the state of ``slots`` (int64 ``[n]``) for the next step.

        Args:
            slots: int64 ``[n]``.
            new: the tensors that the step returned, ``[n, ...]`` each.
            leaves: bool ``[n]``, canvases that leave. Their state is reset to its initial values.
        """
        for name, spec in self.algorithm.state.items():
            reset = leaves.view(-1, *[1] * (new[name].ndim - 1))
            self.state[name].index_copy_(0, slots, new[name].masked_fill(reset, spec.initial))

    def batch(
        self, index: torch.Tensor | None, slots: torch.Tensor, canvas: Canvas
    ) -> AlgorithmBatch:
        """Read the rows of some canvases.

        Args:
            index: see `AlgorithmBatch`.
            slots: see `AlgorithmBatch`.
            canvas: the canvases of the whole batch, ``[n, L]``.
        """
        if index is not None:
            canvas = canvas.take(index)
        parameters = {name: t.index_select(0, slots) for name, t in self.parameters.items()}
        state = {name: t.index_select(0, slots) for name, t in self.state.items()}
        return AlgorithmBatch(self.algorithm, self, index, slots, canvas, parameters, state)


@dataclass(frozen=True)
class AlgorithmBatch:
    """The canvases of a batch that share an algorithm, with their rows of the algorithm's tensors.

    Attributes:
        algorithm: the decoding rule.
        all_slots: the algorithm's tensors for all slots.
        index: int64 ``[m]``, positions of these canvases in the batch; None for the whole batch.
        slots: int64 ``[m]``, the slots of these canvases.
        canvas: the canvases, ``[m, L]``.
        parameters: the algorithm's settings by name, float32 ``[m]`` each.
        state: the algorithm's tensors by name, ``[m, ...]`` each.
    """

    algorithm: Algorithm
    all_slots: AlgorithmSlots
    index: torch.Tensor | None
    slots: torch.Tensor
    canvas: Canvas
    parameters: Mapping[str, torch.Tensor]
    state: Mapping[str, torch.Tensor]


# An algorithm, and the `index` and `slots` of its canvases, see `AlgorithmBatch`.
AlgorithmGroup = tuple[AlgorithmSlots, torch.Tensor | None, torch.Tensor]


class AlgorithmStates:
    """The tensors of every algorithm that any request has used so far.

    Attributes:
        by_name: the tensors by the algorithm's name, in the order in which they were first used.
    """

    def __init__(self, slots: int, length: int, device: torch.device) -> None:
        self.by_name: dict[str, AlgorithmSlots] = {}
        self._shape = slots, length
        self._device = device
        # The position of each slot's algorithm in `by_name`; on the host.
        self._which: np.ndarray = np.zeros(slots, dtype=np.int64)

    def enter(self, slot: int, algorithm: Algorithm, settings: AlgorithmConfig) -> None:
        """Set up ``slot`` for a request; allocates the algorithm's tensors at its first use."""
        name = algorithm.name
        if name not in self.by_name:
            self.by_name[name] = AlgorithmSlots(algorithm, *self._shape, self._device)
        self.by_name[name].enter(slot, settings)
        self._which[slot] = list(self.by_name).index(name)

    def for_slot(self, slot: int) -> AlgorithmSlots:
        """Return the tensors of the algorithm that decodes the request in ``slot``."""
        return list(self.by_name.values())[self._which[slot]]

    def groups(self, slots: torch.Tensor, on_host: np.ndarray) -> list[AlgorithmGroup]:
        """Group the slots of a batch (int64 ``[n]``, and the same on the host) by algorithm."""
        which = self._which[on_host]
        algorithms = list(self.by_name.values())
        if (which == which[0]).all():  # most batches have one algorithm
            return [(algorithms[which[0]], None, slots)]
        groups: list[AlgorithmGroup] = []
        for number in np.unique(which):
            index = to_device(np.flatnonzero(which == number), self._device)
            groups.append((algorithms[number], index, slots.index_select(0, index)))
        return groups


class SlotState:
    """The slots' tensors, indexed by vLLM's request index.

    Attributes:
        tokens, masked, fixed: ``[slots, L]``, see `Canvas`.
        phase: int8 ``[slots]``, a `Phase`.
        after_prefill: int8 ``[slots]``, the phase that follows the prompt: `Phase.DENOISE`, or the
            phase that an interrupted canvas had reached.
        start: int64 ``[slots]``, absolute position of the canvas' first position.
        tail: int64 ``[slots]``, how many positions at the start of the canvas vLLM already counts
            as tokens: those of the prompt and, with `streams`, those that have been output.
        ready: int64 ``[slots]``, length of the canvas prefix that leaves at the commit.
        remaining: int64 ``[slots]``, tokens that the request may still output.
        step: int32 ``[slots]``, denoise steps that the canvas has taken.
        max_steps: int32 ``[slots]``, the cap on `step`.
        schedule_steps: int32 ``[slots]``, steps that a temperature schedule is spread over.
        temperature: float32 ``[slots]``, the request's temperature.
        seed: int64 ``[slots]``, the seed of all random numbers of the request.
        read_only: bool ``[slots]``, the canvas leaves without a commit and ends the request.
        end_tokens: int64 ``[slots, MAX_END_TOKENS]``, padded with ``NO_TOKEN``.
        spoiled: bool ``[slots]``, the last pass over the canvas met NaN or infinities.
        failure: int32 ``[slots]``, a `Failure` if the request fails because of its own parameters,
            else 0.
        algorithms: the tensors of the decoding algorithms.
        position: int64 ``[L]``, 0 to L - 1.
        samples: on the host, bool ``[slots]``, whether the temperature is above 0.
        one_step: on the host, bool ``[slots]``, whether `max_steps` is 1.
        streams: on the host, bool ``[slots]``, the decided beginning of a canvas leaves before the
            canvas is finished.
        records: on the host, bool ``[slots]``, every pass over the request's canvases is recorded.
        whole: on the host, bool ``[slots]``, a canvas leaves when all its positions are decided,
            not when its answer is.
        constrained: on the host, bool ``[slots]``, whether the request follows a constraint.
        needs_rows: on the host, bool ``[slots]``, whether the request has options that change or
            read whole rows of logits.
        reports: on the host, bool ``[slots]``, whether logprobs of the request's tokens are read.
        history: int32 ``[slots, positions]``, every token of the requests; vLLM's own tensor, which
            the sampler sets.
        window: the blocks before the canvases where steps read two blocks, else None.
        spoiled_on_host: bool ``[slots]``, `spoiled` as of the last finished step.
    """

    def __init__(self, slots: int, kind: CanvasKind, device: torch.device) -> None:
        self.kind = kind
        self.length = length = kind.length
        self.device = device

        def full(value: float, dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.full((slots, *shape), value, dtype=dtype, device=device)

        self.tokens = full(kind.mask_token or 0, torch.int64, length)
        self.masked = full(kind.mask_token is not None, torch.bool, length)
        self.fixed = full(False, torch.bool, length)
        self.phase = full(Phase.PREFILL, torch.int8)
        self.after_prefill = full(Phase.DENOISE, torch.int8)
        self.start = full(0, torch.int64)
        self.tail = full(0, torch.int64)
        self.ready = full(0, torch.int64)
        self.remaining = full(0, torch.int64)
        self.step = full(0, torch.int32)
        self.max_steps = full(1, torch.int32)
        self.schedule_steps = full(1, torch.int32)
        self.temperature = full(0, torch.float32)
        self.seed = full(0, torch.int64)
        self.read_only = full(False, torch.bool)
        self.end_tokens = full(NO_TOKEN, torch.int64, MAX_END_TOKENS)
        self.position = torch.arange(length, device=device)
        self.algorithms = AlgorithmStates(slots, length, device)
        self.samples: np.ndarray = np.zeros(slots, dtype=bool)
        self.one_step: np.ndarray = np.zeros(slots, dtype=bool)
        self.streams: np.ndarray = np.zeros(slots, dtype=bool)
        self.records: np.ndarray = np.zeros(slots, dtype=bool)
        self.whole: np.ndarray = np.zeros(slots, dtype=bool)
        self.constrained: np.ndarray = np.zeros(slots, dtype=bool)
        self.needs_rows: np.ndarray = np.zeros(slots, dtype=bool)
        self.reports: np.ndarray = np.zeros(slots, dtype=bool)
        self.history = torch.zeros((0, 0), dtype=torch.int32, device=device)
        self.window: TwoBlockWindow | None = None
        self.spoiled = full(False, torch.bool)
        self.failure = full(Failure.NONE, torch.int32)
        self.spoiled_on_host = torch.zeros(slots, dtype=torch.bool, pin_memory=can_pin(device))

    def enter(self, slot: int, prompt: Sequence[int], seed: int) -> None:
        """Set up ``slot`` for a new request: lay out its first canvas after the prompt."""
        tail = len(prompt) % self.length if self.kind.aligned else 0
        self.seed[slot].fill_(seed)
        self.start[slot].fill_(len(prompt) - tail)
        self.tokens[slot].copy_(self.fresh_tokens(torch.full((1,), slot, device=self.device))[0])
        if tail:
            self._hold(slot, prompt[len(prompt) - tail :])
        self.masked[slot].fill_(self.kind.mask_token is not None)
        self.masked[slot, :tail].fill_(False)
        self.fixed[slot].fill_(False)
        self.fixed[slot, :tail].fill_(True)
        self.phase[slot].fill_(Phase.PREFILL)
        self.after_prefill[slot].fill_(Phase.DENOISE)
        self.tail[slot].fill_(tail)
        self.ready[slot].fill_(0)
        self.step[slot].fill_(0)
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

        It may output `tokens` more tokens, and the ids in `ends` end it. The other arguments are
        the attributes of the same names.
        """
        self.max_steps[slot].fill_(choice.max_steps)
        self.schedule_steps[slot].fill_(choice.schedule_steps)
        self.temperature[slot].fill_(temperature)
        self.remaining[slot].fill_(tokens)
        self.read_only[slot].fill_(read_only)
        row: np.ndarray = np.full(MAX_END_TOKENS, NO_TOKEN, dtype=np.int64)
        ids = sorted(set(ends))[:MAX_END_TOKENS]
        row[: len(ids)] = ids
        self.end_tokens[slot].copy_(to_device(row, self.device))
        self.algorithms.enter(slot, choice.algorithm, choice.settings)
        self.samples[slot] = temperature > 0
        self.one_step[slot] = choice.max_steps == 1
        self.streams[slot] = streams
        self.records[slot] = records
        self.whole[slot] = whole

    def read(self, slots: torch.Tensor) -> tuple[SlotStatus, Canvas]:
        """Copy the state and the canvases of the requests in ``slots`` (int64 ``[n]``)."""
        status = [getattr(self, name).index_select(0, slots) for name in STATUS]
        canvas = (t.index_select(0, slots) for t in (self.tokens, self.masked, self.fixed))
        return SlotStatus(*status), Canvas(*canvas)

    def seed_canvas(self, slot: int, tokens: Sequence[int], pinned: Sequence[int]) -> None:
        """Start the canvas in ``slot`` from these tokens, and fix those at `pinned` positions."""
        self._hold(slot, tokens)
        if pinned:
            is_pinned: np.ndarray = np.zeros(self.length, dtype=bool)
            is_pinned[list(pinned)] = True
            self.fixed[slot].logical_or_(to_device(is_pinned, self.device))

    def _hold(self, slot: int, tokens: Sequence[int]) -> None:
        row: np.ndarray = np.array(tokens, dtype=np.int64)
        self.tokens[slot, : len(row)].copy_(to_device(row, self.device))

    def fresh_tokens(self, slots: torch.Tensor) -> torch.Tensor:
        """Initial tokens, int64 ``[n, L]``, for the canvases of ``slots`` (int64 ``[n]``)."""
        if self.kind.mask_token is not None:
            return torch.full((len(slots), self.length), self.kind.mask_token, device=self.device)
        from vllm_dllm.ops.noise.keyed import Stream, row_keys, uniform_tokens

        keys = row_keys(self.seed[slots], self.start[slots], Stream.CANVAS)
        return uniform_tokens(keys, self.length, self.kind.vocabulary)

    def advance(
        self,
        slots: torch.Tensor,
        after: Canvas,
        leaves: torch.Tensor,
        width: torch.Tensor | int,
        fresh: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store the canvases that a step has updated, and start a new canvas where one leaves.

        Args:
            slots: int64 ``[n]``.
            after: the updated canvases, ``[n, L]``.
            leaves: bool ``[n]``. Where it is true, a fresh canvas replaces the old one.
            width: number of positions of the canvases, int64 ``[n]``, or L for all of them. A fresh
                canvas begins that many positions after the one that leaves.
            fresh: int64 ``[n, L]``, `fresh_tokens` of the next canvases, if already known.

        Returns:
            The tokens that the model reads next, int64 ``[n, L]``.
        """
        replaced = leaves[:, None]
        self.start.index_copy_(0, slots, self.start.index_select(0, slots) + leaves * width)
        if fresh is None:
            fresh = self.fresh_tokens(slots)
        tokens = torch.where(replaced, fresh, after.tokens)
        self.tokens.index_copy_(0, slots, tokens)
        if self.kind.mask_token is not None:
            self.masked.index_copy_(0, slots, after.masked | replaced)
        self.fixed.index_copy_(0, slots, after.fixed & ~replaced)
        return tokens
