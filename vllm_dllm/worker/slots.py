"""Request state: one slot per running request, in tensors allocated once.

Everything that belongs to a request and changes from step to step lives here, on the
device, and is updated in place. Phases and masks are explicit; no token id is ever asked
what it means.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum

import numpy as np
import torch

from vllm_dllm.decoding import Canvas
from vllm_dllm.ops.noise.keyed import Stream, row_keys, uniform_tokens
from vllm_dllm.settings.resolution import Choice
from vllm_dllm.worker.algorithm_state import AlgorithmStates
from vllm_dllm.worker.constraint_state import Constraints
from vllm_dllm.worker.row_options import RowOptions

# End-of-sequence ids that may finish a block early, per request. A request with more ids
# still stops at each of them (vLLM's scheduler sees to that), only without the short cut.
MAX_END_TOKENS = 8
NO_TOKEN = -1


class Mark(IntEnum):
    """What the sampler tells the scheduler of a canvas, in the place of vLLM's number of NaNs."""

    KV_PENDING = -1  # it has left, and its keys and values are still to be written
    NONE = 0
    UNSOUND = 1  # it was read with NaN or infinities
    NO_TOKEN_LEFT = 2  # the request's own parameters rule out every token of a position
    NOT_TAKEN_UP = 3  # its slot could not be set up


class Phase(IntEnum):
    """What the next forward pass over a slot's canvas is for."""

    PREFILL = 0  # prompt chunks; the canvas waits
    DENOISE = 1  # changes the canvas, keeps nothing in the KV cache
    COMMIT = 2  # runs over the final canvas; its KV stays and the tokens leave


@dataclass(frozen=True)
class RequestLimits:
    """Where a request ends.

    Attributes:
        tokens: how many it may still put out.
        ends: token ids that end it.
        read_only: its first canvas is the whole answer.
        stream_prefix: the decided beginning of a canvas leaves before the canvas is finished.
    """

    tokens: int
    ends: Iterable[int] = ()
    read_only: bool = False
    stream_prefix: bool = False


@dataclass(frozen=True)
class CanvasKind:
    """What a model's canvases are.

    Attributes:
        length: L.
        vocabulary: number of token ids.
        mask_token: what a fresh canvas is full of; None for uniform random tokens.
        aligned: canvases begin at absolute multiples of L, so that the prompt's last
            ``len(prompt) % L`` tokens are the first canvas' fixed positions; otherwise
            they begin behind the prompt.
    """

    length: int
    vocabulary: int
    mask_token: int | None
    aligned: bool


@dataclass(frozen=True)
class Standing:
    """Where the requests of a batch stand before a step, in batch order.

    Copies of what a step reads beside the canvases, ``[n]`` for `SlotState`'s ``[slots]``.
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


STANDING = tuple(f.name for f in fields(Standing))


class SlotState:
    """The slots' tensors, indexed by vLLM's request index.

    Attributes:
        tokens, masked, fixed: ``[slots, L]``, see `Canvas`.
        phase: int8 ``[slots]``, a `Phase`.
        after_prefill: int8 ``[slots]``, the phase that follows the prompt: `Phase.DENOISE`, or the
            one that an interrupted canvas had come to.
        start: int64 ``[slots]``, absolute position of the canvas.
        tail: int64 ``[slots]``, positions at the start of the canvas that vLLM has as tokens: the
            prompt's, and with `stream_prefix` those that have been put out.
        ready: int64 ``[slots]``, canvas prefix that leaves at the commit.
        remaining: int64 ``[slots]``, tokens that the request may still put out.
        step: int32 ``[slots]``, denoise steps that the canvas has taken.
        max_steps: int32 ``[slots]``, the cap on `step`.
        schedule_steps: int32 ``[slots]``, what a temperature schedule is spread over.
        temperature: float32 ``[slots]``, the request's own.
        seed: int64 ``[slots]``, all that a request's random numbers come from.
        read_only: bool ``[slots]``, the canvas leaves without a commit and ends the request.
        stream_prefix: bool ``[slots]``, see `RequestLimits`.
        end_tokens: int64 ``[slots, MAX_END_TOKENS]``, padded with ``NO_TOKEN``.
        spoiled: bool ``[slots]``, a canvas was read with NaN or infinities.
        failure: int32 ``[slots]``, a `Mark` with which the request ends for its own sake, or 0.
        algorithms: the tensors of each algorithm that a request has asked for.
        constraints: the automata that requests follow.
        position: int64 ``[L]``, 0 to L - 1.
        samples: on the host, bool ``[slots]``, whether the temperature is above 0.
        streams: on the host, bool ``[slots]``, the same as `stream_prefix`.
        row_options: on the host, by slot, of requests with biases, filters or logprobs.
        history: int32 ``[slots, positions]``, every token of the requests; vLLM's own tensor, which
            the sampler sets.
        needs_rows: on the host, bool ``[slots]``, whether a slot is in `row_options`.
        spoiled_on_host: `spoiled` as of the last step that is finished.
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
        self.stream_prefix = full(False, torch.bool)
        self.end_tokens = full(NO_TOKEN, torch.int64, MAX_END_TOKENS)
        self.position = torch.arange(length, device=device)
        self.algorithms = AlgorithmStates(slots, length, device)
        self.constraints = Constraints(slots, device)
        self.samples: np.ndarray = np.zeros(slots, dtype=bool)
        self.streams: np.ndarray = np.zeros(slots, dtype=bool)
        self.row_options: dict[int, RowOptions] = {}
        self.needs_rows: np.ndarray = np.zeros(slots, dtype=bool)
        self.history = torch.zeros((0, 0), dtype=torch.int32, device=device)
        self.spoiled = full(False, torch.bool)
        self.failure = full(Mark.NONE, torch.int32)
        pinned = device.type == "cuda"
        self.spoiled_on_host = torch.zeros(slots, dtype=torch.bool, pin_memory=pinned)

    def enter(self, slot: int, prompt: Sequence[int], seed: int) -> None:
        """A request enters ``slot``: lay out its first canvas behind the prompt."""
        tail = len(prompt) % self.length if self.kind.aligned else 0
        self.seed[slot].fill_(seed)
        self.start[slot].fill_(len(prompt) - tail)
        self.tokens[slot].copy_(self.fresh_tokens(torch.tensor([slot], device=self.device))[0])
        if tail:
            self._hold(slot, np.arange(tail), prompt[len(prompt) - tail :])
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
        self.failure[slot].fill_(int(Mark.NONE))

    def configure(
        self, slot: int, choice: Choice, temperature: float, limits: RequestLimits
    ) -> None:
        """Set what the request in ``slot`` chose."""
        self.max_steps[slot].fill_(choice.max_steps)
        self.schedule_steps[slot].fill_(choice.schedule_steps)
        self.temperature[slot].fill_(temperature)
        self.remaining[slot].fill_(limits.tokens)
        self.read_only[slot].fill_(limits.read_only)
        self.stream_prefix[slot].fill_(limits.stream_prefix)
        row: np.ndarray = np.full(MAX_END_TOKENS, NO_TOKEN, dtype=np.int64)
        ids = sorted(set(limits.ends))[:MAX_END_TOKENS]
        row[: len(ids)] = ids
        self.end_tokens[slot].copy_(torch.from_numpy(row))
        self.algorithms.enter(slot, choice.algorithm, choice.settings)
        self.samples[slot] = temperature > 0
        self.streams[slot] = limits.stream_prefix

    def set_row_options(self, slot: int, options: RowOptions | None) -> None:
        """Note what the request in ``slot`` asks for that changes or reads whole rows of logits."""
        self.row_options.pop(slot, None)
        if options is not None:
            self.row_options[slot] = options
        self.needs_rows[slot] = options is not None

    def with_row_options(self, on_host: np.ndarray) -> list[tuple[int, int, RowOptions]]:
        """(index in the batch, slot, options) of the requests of a batch that have row options."""
        found = np.flatnonzero(self.needs_rows[on_host]).tolist()
        return [(n, int(on_host[n]), self.row_options[int(on_host[n])]) for n in found]

    def read(self, slots: torch.Tensor) -> tuple[Standing, Canvas]:
        """Where the requests of ``slots`` (int64 ``[n]``) stand, and their canvases, as copies."""
        standing = [getattr(self, name).index_select(0, slots) for name in STANDING]
        canvas = (t.index_select(0, slots) for t in (self.tokens, self.masked, self.fixed))
        return Standing(*standing), Canvas(*canvas)

    def seed_canvas(self, slot: int, tokens: Sequence[int], pinned: Sequence[int]) -> None:
        """Start from given tokens, and hold those at the `pinned` positions."""
        self._hold(slot, np.arange(len(tokens)), tokens)
        if pinned:
            at = torch.tensor(pinned, device=self.device)
            self.fixed[slot, at] = True

    def _hold(self, slot: int, positions: np.ndarray, tokens: Sequence[int]) -> None:
        row = torch.from_numpy(np.asarray(tokens, dtype=np.int64))
        self.tokens[slot, : len(positions)].copy_(row)

    def fresh_tokens(self, slots: torch.Tensor) -> torch.Tensor:
        """What the canvases at ``start`` of ``slots`` (int64 ``[n]``) begin with, ``[n, L]``."""
        if self.kind.mask_token is not None:
            return torch.full((len(slots), self.length), self.kind.mask_token, device=self.device)
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
        """Keep what a step made of the canvases of ``slots`` (int64 ``[n]``).

        Those that are true in ``leaves`` (bool ``[n]``) make room for a fresh one behind them;
        `width` is how far they reached. Nothing of a canvas outlives it. `fresh` is int64
        ``[n, L]`` where the step has computed `fresh_tokens` of the next canvases.

        Returns:
            int64 ``[n, L]``, what the model reads next.
        """
        every = leaves[:, None]
        self.start.index_add_(0, slots, leaves * width)
        if fresh is None:
            fresh = self.fresh_tokens(slots)
        tokens = torch.where(every, fresh, after.tokens)
        self.tokens.index_copy_(0, slots, tokens)
        if self.kind.mask_token is not None:
            self.masked.index_copy_(0, slots, after.masked | every)
        self.fixed.index_copy_(0, slots, after.fixed & ~every)
        return tokens
