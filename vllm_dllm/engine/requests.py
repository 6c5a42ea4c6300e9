"""Request state: one slot per running request, in tensors allocated once.

Everything that belongs to a request and changes from step to step lives here, on the
device, and is updated in place. Phases and masks are explicit; no token id is ever asked
what it means.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch

from vllm_dllm.decoding import Algorithm, Canvas
from vllm_dllm.engine.choices import Choice
from vllm_dllm.ops.noise import Stream, row_keys, uniform_tokens

# End-of-sequence ids that may finish a block early, per request. A request with more ids
# still stops at each of them (vLLM's scheduler sees to that), only without the short cut.
MAX_END_TOKENS = 8
NO_TOKEN = -1


class Phase(IntEnum):
    """What the next forward pass over a slot's canvas is for."""

    PREFILL = 0  # prompt chunks; the canvas waits
    DENOISE = 1  # changes the canvas, keeps nothing in the KV cache
    COMMIT = 2  # runs over the final canvas; its KV stays and the tokens leave


@dataclass(frozen=True)
class Bank:
    """One algorithm's tensors for all slots; those of slots with another one are not read.

    Attributes:
        algorithm: the rule.
        parameters: float32 ``[slots]`` each, its settings.
        state: its tensors between steps, see `StateTensor`.
    """

    algorithm: Algorithm
    parameters: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]

    @classmethod
    def make(cls, algorithm: Algorithm, slots: int, length: int, device: torch.device) -> Bank:
        """Tensors at their initial values."""
        state = {}
        for name, spec in algorithm.state.items():
            shape = (slots, *([length] if spec.per_position else []), *spec.extra)
            state[name] = torch.full(shape, spec.initial, dtype=spec.dtype, device=device)
        names = algorithm.config.ranges()
        return cls(algorithm, {name: torch.zeros(slots, device=device) for name in names}, state)

    def reset(self, slots: torch.Tensor, where: torch.Tensor) -> None:
        """Initial state for those of ``slots`` (int64 ``[n]``) that are true in ``where``."""
        for name, tensor in self.state.items():
            at = where.view(-1, *[1] * (tensor.ndim - 1))
            initial = self.algorithm.state[name].initial
            fresh = torch.where(at, initial, tensor[slots]).to(tensor.dtype)
            tensor.index_copy_(0, slots, fresh)


@dataclass(frozen=True)
class Limits:
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


class SlotState:
    """The slots' tensors, indexed by vLLM's request index.

    Attributes:
        tokens, masked, fixed: ``[slots, L]``, see `Canvas`.
        phase: int8 ``[slots]``, a `Phase`.
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
        stream_prefix: bool ``[slots]``, see `Limits`.
        end_tokens: int64 ``[slots, MAX_END_TOKENS]``, padded with ``NO_TOKEN``.
        banks: the tensors of each algorithm that a request has asked for, by its name.
        samples: on the host, bool ``[slots]``, whether the temperature is above 0.
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
        self.banks: dict[str, Bank] = {}
        # On the host: each slot's bank, by the order of their first use.
        self._which: np.ndarray = np.zeros(slots, dtype=np.int64)
        self.samples: np.ndarray = np.zeros(slots, dtype=bool)

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
        self.tail[slot].fill_(tail)
        self.ready[slot].fill_(0)
        self.step[slot].fill_(0)

    def configure(self, slot: int, choice: Choice, temperature: float, limits: Limits) -> None:
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
        bank = self._bank(choice.algorithm)
        for name, value in choice.settings.values().items():
            bank.parameters[name][slot].fill_(float(value))
        at = torch.tensor([slot], device=self.device)
        bank.reset(at, torch.ones_like(at, dtype=torch.bool))
        self.samples[slot] = temperature > 0
        self._which[slot] = list(self.banks).index(choice.algorithm.name)

    def _bank(self, algorithm: Algorithm) -> Bank:
        """An algorithm's tensors, which exist from its first request on."""
        name = algorithm.name
        if name not in self.banks:
            slots, length = self.tokens.shape
            self.banks[name] = Bank.make(algorithm, slots, length, self.device)
        return self.banks[name]

    def groups(self, slots: np.ndarray) -> list[tuple[Bank, torch.Tensor | None]]:
        """The algorithms of ``slots`` (int ``[n]``, on the host), and which of them use it.

        The index is int64 ``[m]`` on the device; None stands for all: most batches have one
        algorithm.
        """
        which = self._which[slots]
        banks = list(self.banks.values())
        present = np.unique(which)
        if len(present) == 1:
            return [(banks[present[0]], None)]
        found = []
        for n in present:
            index = torch.from_numpy(np.flatnonzero(which == n))
            found.append((banks[n], index.to(self.device, non_blocking=True)))
        return found

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

    def canvas(self, slots: torch.Tensor) -> Canvas:
        """The canvases of ``slots`` (int64 ``[n]``), as copies."""
        return Canvas(self.tokens[slots], self.masked[slots], self.fixed[slots])

    def advance(self, slots: torch.Tensor, after: Canvas) -> None:
        """Keep what a denoise step made of the canvases of ``slots``."""
        self.tokens.index_copy_(0, slots, after.tokens)
        self.masked.index_copy_(0, slots, after.masked)
        self.fixed.index_copy_(0, slots, after.fixed)
        self.step.index_add_(0, slots, torch.ones_like(slots, dtype=torch.int32))

    def renew(self, slots: torch.Tensor, where: torch.Tensor, width: torch.Tensor | int) -> None:
        """A fresh canvas in those of ``slots`` that are true in ``where`` (bool ``[n]``).

        `width` is how far the old one reached. Nothing of a canvas outlives it; the state of its
        algorithm is reset by `Bank.reset`.
        """
        self.start.index_add_(0, slots, where * width)
        every = where[:, None]
        fresh = torch.where(every, self.fresh_tokens(slots), self.tokens[slots])
        self.tokens.index_copy_(0, slots, fresh)
        is_masked = self.kind.mask_token is not None
        self.masked.index_copy_(0, slots, torch.where(every, is_masked, self.masked[slots]))
        self.fixed.index_copy_(0, slots, self.fixed[slots] & ~every)
        self.tail.index_copy_(0, slots, self.tail[slots] * ~where)
        self.step.index_copy_(0, slots, self.step[slots] * ~where)
