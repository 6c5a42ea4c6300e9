"""The constraints of running requests: each slot's automaton, and the state that it has reached.

A batch without a constrained request only costs a look-up on the host. Otherwise the canvases that
share an automaton are one group, and a step runs tensor operations on each group; see
`vllm_dllm.constraints` for what they compute.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import numpy as np
import torch

from vllm_dllm.constraints.automaton.distance import DEAD
from vllm_dllm.constraints.automaton.token_automaton import TokenAutomaton
from vllm_dllm.constraints.decoding.best_path import CanvasWindow, DeviceAutomaton
from vllm_dllm.constraints.decoding.class_weights import TokenChunks
from vllm_dllm.constraints.decoding.constrained_step import (
    ConstrainedPath,
    best_tokens,
    drawn_tokens,
)
from vllm_dllm.worker.to_device import to_device

FREE = -1

Parts = TypeVar("Parts", DeviceAutomaton, TokenChunks)


@dataclass(frozen=True)
class Follower:
    """An automaton that requests follow, on the host and on the device.

    Attributes:
        key: digest of the packed automaton.
        on_host: the automaton on the host.
        automaton: the automaton on the device.
        chunks: the vocabulary by the automaton's classes of tokens.
    """

    key: str
    on_host: TokenAutomaton
    automaton: DeviceAutomaton
    chunks: TokenChunks

    @classmethod
    def of(cls, key: str, packed: bytes, device: torch.device) -> Follower:
        """Unpack the automaton that comes with a request, and copy it to the device.

        All that depends on its values is computed on the host, so that nothing waits for the
        device.
        """
        on_host = TokenAutomaton.from_bytes(packed)
        automaton = DeviceAutomaton.of(on_host, torch.device("cpu"))
        chunks = TokenChunks.of(automaton.class_of_token, automaton.classes)
        return cls(key, on_host, _on_device(automaton, device), _on_device(chunks, device))

    def choose(
        self, logits: torch.Tensor, window: CanvasWindow, keys: torch.Tensor | None = None
    ) -> ConstrainedPath:
        """A path through each canvas: the most probable one, or with `keys` a drawn one.

        Args:
            logits: ``[m, L, ids]``, divided by the temperature where a path is drawn.
            window: the ``m`` canvases as constraints see them.
            keys: int64 ``[m, L]``, the keys of the random numbers, or None.
        """
        if keys is None:
            return best_tokens(self.automaton, self.chunks, logits, window)
        return drawn_tokens(self.automaton, self.chunks, logits, window, keys)


def _on_device(parts: Parts, device: torch.device) -> Parts:
    """A copy of a dataclass with its tensors on the device."""
    named = {f.name: getattr(parts, f.name) for f in fields(parts)}
    tensors = {name: part for name, part in named.items() if isinstance(part, torch.Tensor)}
    return replace(parts, **{name: to_device(part, device) for name, part in tensors.items()})


class Constraints:
    """The automaton of each slot (kept on the host) and its state (kept on the device).

    Attributes:
        state: int64 ``[slots]``, the automaton's state after the tokens output so far.
        followers: the automata of running requests, by number.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        self.state = torch.zeros(slots, dtype=torch.int64, device=device)
        self.device = device
        self.followers: dict[int, Follower] = {}
        self._which: np.ndarray = np.full(slots, FREE, dtype=np.int64)
        self._next = 0

    def enter(self, slot: int, packed: bytes | None, output: np.ndarray) -> None:
        """Set up ``slot`` for a request.

        Args:
            slot: the request's slot.
            packed: the request's packed automaton, or None.
            output: int ``[tokens]``, the tokens it had output before it was preempted.
        """
        self.leave(slot)
        if packed is None:
            return
        number = self._number(packed)
        self._which[slot] = number
        automaton = self.followers[number].on_host
        state = automaton.advance(0, output)
        self.state[slot].fill_(automaton.states if state == DEAD else state)

    def leave(self, slot: int) -> None:
        """Free ``slot``, and its automaton (up to about 100 MB) unless other slots follow it."""
        number, self._which[slot] = int(self._which[slot]), FREE
        if number != FREE and not (self._which == number).any():
            del self.followers[number]

    def _number(self, packed: bytes) -> int:
        """The number of an automaton; requests with equal automata share one."""
        key = hashlib.sha256(packed).hexdigest()
        for number, follower in self.followers.items():
            if follower.key == key:
                return number
        self._next += 1
        self.followers[self._next] = Follower.of(key, packed, self.device)
        return self._next

    def asked(self, on_host: np.ndarray) -> bool:
        """Whether a request of a batch is constrained."""
        return bool(self.followers) and bool(self.constrained(on_host).any())

    def constrained(self, on_host: np.ndarray) -> np.ndarray:
        """Which requests of a batch are constrained, bool ``[n]``, on the host."""
        constrained: np.ndarray = self._which[on_host] != FREE
        return constrained

    def groups(
        self, on_host: np.ndarray, samples: np.ndarray
    ) -> Iterator[tuple[Follower, bool, torch.Tensor]]:
        """Group the constrained canvases of a batch by automaton, and by whether they draw.

        Args:
            on_host: the slots of the batch, int ``[n]``.
            samples: bool ``[n]``, whether a request draws.

        Yields:
            The automaton, whether paths are drawn, and the canvases' positions in the batch (int64
            on the device).
        """
        which = self._which[on_host]
        kinds = np.where(which == FREE, FREE, 2 * which + samples)
        for kind in np.unique(kinds[kinds != FREE]).tolist():
            index = to_device(np.flatnonzero(kinds == kind), self.device)
            yield self.followers[kind // 2], bool(kind % 2), index

    def advance(self, slots: torch.Tensor, path: ConstrainedPath, out: torch.Tensor) -> None:
        """Advance the states of ``slots`` (int64 ``[n]``) by the tokens that were output.

        `out` int64 ``[n]`` is the length of the prefix of each canvas that has been output so far.
        Where it has not grown, the state stays the same.
        """
        self.state.index_copy_(0, slots, path.states.gather(1, out[:, None])[:, 0])
