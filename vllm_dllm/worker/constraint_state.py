"""The constraints of running requests: each slot's automaton, and the state that it has reached.

A batch without a constrained request only costs a look-up on the host. Otherwise one step serves
all constrained canvases, whatever their automata are; see `vllm_dllm.constraints` for what it
computes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Generic, TypeVar

import numpy as np
import torch

from vllm_dllm.constraints.automaton.distance import DEAD
from vllm_dllm.constraints.automaton.token_automaton import TokenAutomaton
from vllm_dllm.constraints.decoding.automaton_batch import AutomatonBatch, OwnEdges
from vllm_dllm.constraints.decoding.constrained_step import BatchConstraint, ConstrainedPath
from vllm_dllm.constraints.decoding.token_classes import BatchClasses, TokenClasses
from vllm_dllm.worker.to_device import to_device

FREE = -1
# For how many sets of canvases the union of their automata is kept. A steady batch is one set for
# each part that the readout makes of it, or two where some of its requests draw.
MOST_KEPT = 8

Part = TypeVar("Part", OwnEdges, TokenClasses)
Whole = TypeVar("Whole", AutomatonBatch, BatchClasses)


@dataclass(frozen=True)
class Follower:
    """An automaton that requests follow.

    Attributes:
        key: digest of the packed automaton.
        on_host: the automaton.
        edges: the same, to be joined with others; on the host.
        classes: its classes of tokens, on the device.
    """

    key: str
    on_host: TokenAutomaton
    edges: OwnEdges
    classes: TokenClasses

    @classmethod
    def of(cls, key: str, packed: bytes, device: torch.device) -> Follower:
        """Unpack the automaton that comes with a request, and copy its classes to the device.

        All that depends on its values is computed on the host, so that nothing waits for the
        device.
        """
        on_host = TokenAutomaton.from_bytes(packed)
        classes = TokenClasses.of(on_host.class_of_token, on_host.classes)
        return cls(key, on_host, OwnEdges.of(on_host), _on_device(classes, device))


def _on_device(classes: TokenClasses, device: torch.device) -> TokenClasses:
    """A copy with its tensors on the device."""
    named = {f.name: getattr(classes, f.name) for f in fields(classes)}
    tensors = {name: part for name, part in named.items() if isinstance(part, torch.Tensor)}
    return replace(classes, **{name: to_device(part, device) for name, part in tensors.items()})


class Unions(Generic[Part, Whole]):
    """What has been made of some parts, for the next step with the very same parts."""

    def __init__(self, make: Callable[[Sequence[Part]], Whole]) -> None:
        self.make: Callable[[Sequence[Part]], Whole] = make
        # The parts are kept too, so that their ids are those of no other objects.
        self.kept: dict[tuple[int, ...], tuple[Sequence[Part], Whole]] = {}

    def of(self, parts: Sequence[Part]) -> Whole:
        """The union of these parts, in this order."""
        key = tuple(map(id, parts))
        if key not in self.kept:
            if len(self.kept) >= MOST_KEPT:
                self.kept.clear()
            self.kept[key] = parts, self.make(parts)
        return self.kept[key][1]


class Constraints:
    """The automaton of each slot (kept on the host) and its state (kept on the device).

    Attributes:
        state: int64 ``[slots]``, the state of the slot's automaton in `edges` after the tokens
            output so far.
        followers: the automata of running requests, by number.
        edges: by slot, the automaton that its canvas follows. Any automaton with the token classes
            of the slot's follower may stand here, as long as `state` is one of its states.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        self.state = torch.zeros(slots, dtype=torch.int64, device=device)
        self.device = device
        self.followers: dict[int, Follower] = {}
        self.edges: dict[int, OwnEdges] = {}
        self._which: np.ndarray = np.full(slots, FREE, dtype=np.int64)
        self._next = 0
        self._automata: Unions[OwnEdges, AutomatonBatch] = Unions(self._joined)
        self._classes: Unions[TokenClasses, BatchClasses] = Unions(BatchClasses.of)

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
        follower = self.followers[number]
        self.edges[slot] = follower.edges
        state = follower.on_host.advance(0, output)
        self.state[slot].fill_(follower.edges.dead if state == DEAD else state)

    def leave(self, slot: int) -> None:
        """Free ``slot``, and its automaton (up to about 100 MB) unless other slots follow it."""
        number, self._which[slot] = int(self._which[slot]), FREE
        if number == FREE:
            return
        del self.edges[slot]
        if not (self._which == number).any():
            del self.followers[number]
            self._automata.kept.clear()
            self._classes.kept.clear()

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

    def of(self, on_host: np.ndarray) -> BatchConstraint:
        """What constrained canvases must follow; kept for the next step with the same canvases.

        Args:
            on_host: their slots, int ``[n]``.
        """
        edges = [self.edges[slot] for slot in on_host.tolist()]
        classes = [self.followers[number].classes for number in self._which[on_host].tolist()]
        return BatchConstraint(self._automata.of(edges), self._classes.of(classes))

    def _joined(self, parts: Sequence[OwnEdges]) -> AutomatonBatch:
        return AutomatonBatch.of(parts, lambda array: to_device(array, self.device))

    def advance(self, slots: torch.Tensor, path: ConstrainedPath, out: torch.Tensor) -> None:
        """Advance the states of ``slots`` (int64 ``[n]``) by the tokens that were output.

        `out` int64 ``[n]`` is the length of the prefix of each canvas that has been output so far.
        Where it has not grown, the state stays the same.
        """
        self.state.index_copy_(0, slots, path.states.gather(1, out[:, None])[:, 0])
