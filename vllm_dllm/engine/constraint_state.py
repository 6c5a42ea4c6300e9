"""The constraints of running requests: each slot's automaton, and the state that it has reached.

A batch without a constrained request only costs a look-up on the host. Otherwise one step serves
all constrained canvases, whatever their automata are; see `canvas_grammar.decoding` for what
it computes. Until a request has a constraint, nothing of that package is imported.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
import torch

from vllm_dllm.engine.canvas_starts import CanvasStarts
from vllm_dllm.engine.to_device import to_device

if TYPE_CHECKING:
    from vllm_dllm.constraints.grammar import (
        AutomatonBatch,
        BatchClasses,
        BatchConstraint,
        ConstrainedPath,
        OwnEdges,
        TokenClasses,
    )
    from vllm_dllm.engine.constraint_views import Follower, View

FREE = -1
# For how many sets of canvases the union of their automata is kept. A steady batch is one set for
# each part that the readout makes of it, or two where some of its requests draw.
MOST_KEPT = 8

Part = TypeVar("Part")
Whole = TypeVar("Whole")


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
    """The constraint of each slot (kept on the host) and its state (kept on the device).

    A canvas follows a part of its constraint that begins in the state before the canvas; see
    `canvas_grammar.automaton.windows`.

    Attributes:
        state: int64 ``[slots]``, the state in the slot's view after the tokens output so far.
        followers: the constraints of running requests, by number.
        views: by slot, the part of its constraint that its canvas follows.
    """

    def __init__(self, slots: int, length: int, device: torch.device) -> None:
        self.state = torch.zeros(slots, dtype=torch.int64, device=device)
        self.device = device
        self.length = length
        self.followers: dict[int, Follower] = {}
        self.views: dict[int, View] = {}
        self._which: np.ndarray = np.full(slots, FREE, dtype=np.int64)
        self.starts = CanvasStarts(slots, device)
        self._next = 0
        self._automata: Unions[OwnEdges, AutomatonBatch] = Unions(self._joined)
        self._classes: Unions[TokenClasses, BatchClasses] = Unions(_joined_classes)

    def enter(self, slot: int, packed: bytes | None, output: np.ndarray) -> None:
        """Set up ``slot`` for a request whose next canvas is a new one.

        Args:
            slot: the request's slot.
            packed: the request's packed constraint, or None.
            output: int ``[tokens]``, the tokens it had output before it was preempted.
        """
        self.leave(slot)
        if packed is None:
            return
        self._which[slot] = self._number(packed)
        self.resume(slot, output, len(output))

    def resume(self, slot: int, output: np.ndarray, before: int) -> None:
        """Give ``slot`` the view of a canvas that has begun.

        Args:
            slot: the slot; nothing happens if its request has no constraint.
            output: int ``[tokens]``, all tokens that the request has output.
            before: how many of them were output before the canvas began.
        """
        number = int(self._which[slot])
        if number == FREE:
            return
        from vllm_dllm.constraints.grammar import NO_STATE, START

        follower, tokens = self.followers[number], output.tolist()
        first = follower.after(tokens[:before])
        view = self.views[slot] = follower.view(START if first == NO_STATE else first)
        self.starts.enter(slot, moves=not view.whole)
        reached = NO_STATE if first == NO_STATE else follower.after(tokens[before:], first)
        self.state[slot].fill_(view.place(reached))

    def begin_canvases(self) -> None:
        """Give canvases that have begun the part of their constraints that is near."""
        for slot, place in self.starts.begun():
            follower = self.followers[int(self._which[slot])]
            self.views[slot], place = follower.next_view(self.views[slot], place)
            self.state[slot].fill_(place)
            self.starts.answer(slot)

    def leave(self, slot: int) -> None:
        """Free ``slot``, and its constraint unless other slots follow it."""
        number, self._which[slot] = int(self._which[slot]), FREE
        self.starts.leave(slot)
        if number == FREE:
            return
        self.views.pop(slot, None)
        if not (self._which == number).any():
            del self.followers[number]
            self._automata.kept.clear()
            self._classes.kept.clear()

    def _number(self, packed: bytes) -> int:
        """The number of a constraint; requests with equal constraints share one."""
        key = hashlib.sha256(packed).hexdigest()
        for number, follower in self.followers.items():
            if follower.key == key:
                return number
        from vllm_dllm.engine.constraint_views import Follower

        self._next += 1
        self.followers[self._next] = Follower(key, packed, self.length, self.device)
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
        from vllm_dllm.constraints.grammar import BatchConstraint

        edges = [self.views[slot].edges for slot in on_host.tolist()]
        classes = [self.followers[number].classes for number in self._which[on_host].tolist()]
        return BatchConstraint(self._automata.of(edges), self._classes.of(classes))

    def _joined(self, parts: Sequence[OwnEdges]) -> AutomatonBatch:
        from vllm_dllm.constraints.grammar import AutomatonBatch

        return AutomatonBatch.of(parts, lambda array: to_device(array, self.device))

    def advance(
        self, slots: torch.Tensor, path: ConstrainedPath, out: torch.Tensor, leaves: torch.Tensor
    ) -> None:
        """Advance the states of ``slots`` (int64 ``[n]``) by the tokens that were output.

        `out` int64 ``[n]`` is the length of the prefix of each canvas that has been output so far.
        Where it has not grown, the state stays the same. Where a canvas `leaves`, bool ``[n]``, the
        next one begins.
        """
        self.state.index_copy_(0, slots, path.states.gather(1, out[:, None])[:, 0])
        self.starts.tell(self.state, slots, leaves)


def _joined_classes(parts: Sequence[TokenClasses]) -> BatchClasses:
    from vllm_dllm.constraints.grammar import BatchClasses

    return BatchClasses.of(parts)
