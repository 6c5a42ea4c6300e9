"""Tells the host in which states canvases begin, without waiting for the device.

A canvas of a large constraint follows the part of it that is near the canvas' first state, and only
the host can find that part. When a canvas leaves, its slot *asks*: a number on the device grows.
The numbers and the states are copied to the host behind every step, and the host answers at the
first step that can read the copy without waiting. Until then the new canvas waits: a step changes
nothing of it. On a GPU that is one step for each canvas, because the host prepares a step while the
one before it is running. The number of steps depends on nothing else, so all ranks agree.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np
import torch

from vllm_dllm.engine.to_device import can_pin

# Numbers that a slot may use for one request, so that a late copy never concerns another one.
NUMBERS = 1 << 32


class _Copy:
    """A buffer on the host for one copy from the device."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self.device = device
        self.tensor = torch.zeros((2, slots), dtype=torch.int64, pin_memory=can_pin(device))

    @cached_property
    def array(self) -> np.ndarray:
        """The buffer itself."""
        return self.tensor.numpy()

    @cached_property
    def event(self) -> torch.Event | None:
        """Says when a copy is done; None where copying waits."""
        return torch.Event(self.device) if can_pin(self.device) else None

    def take(self, values: torch.Tensor) -> None:
        """Begin to copy."""
        self.tensor.copy_(values, non_blocking=True)
        if self.event is not None:
            self.event.record()

    def read(self) -> np.ndarray:
        """What was copied; waits if that is not done."""
        if self.event is not None:
            self.event.synchronize()
        return self.array


class CanvasStarts:
    """Which slots have begun a canvas and ask for what it must follow.

    Attributes:
        late: how many steps pass between a copy and its use, 0 or 1.
    """

    def __init__(self, slots: int, device: torch.device, late: int | None = None) -> None:
        self.late = int(can_pin(device)) if late is None else late
        self.asked = torch.zeros(slots, dtype=torch.int64, device=device)
        self.answered = torch.zeros(slots, dtype=torch.int64, device=device)
        self.moving = torch.zeros(slots, dtype=torch.int64, device=device)
        # The same on the host: which constraints are larger than a view, and the last answers.
        self._moves: np.ndarray = np.zeros(slots, dtype=bool)
        self._last: np.ndarray = np.zeros(slots, dtype=np.int64)
        self._free = [_Copy(slots, device) for _ in range(self.late + 1)]
        self._waiting: list[_Copy] = []
        self._requests = 0

    def enter(self, slot: int, moves: bool) -> None:
        """Set up ``slot`` for a canvas that has what it needs; `moves` if its next one may not."""
        self._requests += 1
        first = self._requests * NUMBERS
        self._moves[slot], self._last[slot] = moves, first
        self.moving[slot].fill_(int(moves))
        self.asked[slot].fill_(first)
        self.answered[slot].fill_(first)

    def leave(self, slot: int) -> None:
        """Expect no canvas of ``slot``."""
        self._moves[slot] = False

    def waits(self, slots: torch.Tensor, on_host: np.ndarray) -> torch.Tensor | None:
        """Canvases that have no answer yet, bool ``[n]``; None where none can be waiting.

        Args:
            slots: int64 ``[n]``, the slots of the batch.
            on_host: the same on the host.
        """
        if not self.late or not self._moves[on_host].any():
            return None
        return self.asked.index_select(0, slots) != self.answered.index_select(0, slots)

    def tell(self, states: torch.Tensor, slots: torch.Tensor, leaves: torch.Tensor) -> None:
        """Let canvases that begin behind those that leave ask, and begin to copy.

        Args:
            states: int64, the states of all slots.
            slots: int64 ``[n]``, the slots of the batch.
            leaves: bool ``[n]``, whose canvas leaves.
        """
        if not self._moves.any():
            return
        self.asked.index_add_(0, slots, self.moving.index_select(0, slots) * leaves)
        copy = self._free.pop()
        copy.take(torch.stack([self.asked, states]))
        self._waiting.append(copy)

    def begun(self) -> Iterator[tuple[int, int]]:
        """The slots that ask, and the states in which their canvases begin."""
        while len(self._waiting) > self.late:
            copy = self._waiting.pop(0)
            asked, states = copy.read()
            slots = np.flatnonzero(self._moves & (asked == self._last + 1))
            found = list(zip(slots.tolist(), states[slots].tolist(), strict=True))
            self._free.append(copy)
            yield from found

    def answer(self, slot: int) -> None:
        """The canvas of ``slot`` has what it needs."""
        self._last[slot] += 1
        self.answered[slot].fill_(int(self._last[slot]))
