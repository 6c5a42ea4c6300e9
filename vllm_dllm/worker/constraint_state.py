"""The constraints of running requests: which automaton a slot follows, and how far it has come.

A batch without a constrained request pays one look at the host. In a batch with some, canvases that
share an automaton are one group, and a step is tensor operations on each group; see
`vllm_dllm.constraints` for what they compute.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

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

FREE = -1


@dataclass(frozen=True)
class Follower:
    """An automaton where the model runs, and how its classes lie in the vocabulary.

    Attributes:
        key: digest of what a request brings.
        known: the automaton, on the host.
    """

    key: str
    known: TokenAutomaton
    automaton: DeviceAutomaton
    chunks: TokenChunks

    @classmethod
    def of(cls, key: str, packed: bytes, device: torch.device) -> Follower:
        """From what a request brings."""
        known = TokenAutomaton.from_bytes(packed)
        automaton = DeviceAutomaton.of(known, device)
        return cls(
            key, known, automaton, TokenChunks.of(automaton.class_of_token, automaton.classes)
        )

    def choose(
        self, logits: torch.Tensor, window: CanvasWindow, keys: torch.Tensor | None = None
    ) -> ConstrainedPath:
        """A path through each canvas: the best, or with `keys` one drawn.

        Args:
            logits: ``[m, L, ids]``, over the temperature where a path is drawn.
            window: of ``m`` canvases.
            keys: int64 ``[m, L]``, or None.
        """
        if keys is None:
            return best_tokens(self.automaton, self.chunks, logits, window)
        return drawn_tokens(self.automaton, self.chunks, logits, window, keys)


class Constraints:
    """By slot, the automaton (on the host) and its state (on the device).

    Attributes:
        state: int64 ``[slots]``, behind the tokens that a request has put out.
        followers: the automata of running requests, by number, on the host.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        self.state = torch.zeros(slots, dtype=torch.int64, device=device)
        self.device = device
        self.followers: dict[int, Follower] = {}
        self._which: np.ndarray = np.full(slots, FREE, dtype=np.int64)
        self._next = 0

    def enter(self, slot: int, packed: bytes | None, put_out: np.ndarray) -> None:
        """A request enters ``slot``.

        Args:
            slot: where.
            packed: its automaton, or None.
            put_out: int ``[tokens]``, what it had put out before it was preempted.
        """
        self.leave(slot)
        if packed is None:
            return
        number = self._number(packed)
        self._which[slot] = number
        known = self.followers[number].known
        state = known.advance(0, put_out)
        self.state[slot].fill_(known.states if state == DEAD else state)

    def leave(self, slot: int) -> None:
        """The request in ``slot`` is gone; an automaton may hold a hundred megabytes."""
        number, self._which[slot] = int(self._which[slot]), FREE
        if number != FREE and not (self._which == number).any():
            del self.followers[number]

    def _number(self, packed: bytes) -> int:
        """The number of an automaton; requests with equal ones share it."""
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
        """(automaton, whether paths are drawn, int64 index) of canvases that share both.

        `samples` bool ``[n]`` tells who draws.
        """
        which = self._which[on_host]
        kind = np.where(which == FREE, FREE, 2 * which + samples)
        for found in np.unique(kind[kind != FREE]).tolist():
            index = torch.from_numpy(np.flatnonzero(kind == found))
            index = index.to(self.device, non_blocking=True)
            yield self.followers[found // 2], bool(found % 2), index

    def advance(self, slots: torch.Tensor, path: ConstrainedPath, out: torch.Tensor) -> None:
        """Note how far the requests of ``slots`` (int64 ``[n]``) have come.

        `out` int64 ``[n]`` is the prefix of each canvas that has been put out by now; where it is
        what it was, the state does not change either.
        """
        self.state.index_copy_(0, slots, path.states.gather(1, out[:, None])[:, 0])
