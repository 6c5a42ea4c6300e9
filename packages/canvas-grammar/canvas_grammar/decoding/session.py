"""Sessions: constraints that canvases on a device follow, each a part of its constraint."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from functools import cached_property

import torch

from canvas_grammar.automaton.compiled import CompiledConstraint
from canvas_grammar.automaton.configurations import START
from canvas_grammar.automaton.explorer import Answer, Explorer, Question
from canvas_grammar.automaton.parts import MOST_PARTS, Part, Parts
from canvas_grammar.automaton.tables import Tables
from canvas_grammar.decoding.best_path import CanvasWindow, ConstrainedPath, FreeTokens
from canvas_grammar.decoding.path_finder import PathFinder, PathStep, PlannedCanvas, path_finder


class Session(Parts):
    """A compiled constraint on a device. Any number of requests may follow it.

    Everything that depends on the constraint's values is computed on the host, so nothing waits for
    the device.
    """

    def __init__(self, constraint: CompiledConstraint, length: int, device: torch.device) -> None:
        """Unpack a constraint for canvases of `length` tokens, and copy it to the device."""
        self._device = device
        super().__init__(constraint, length)
        self.classes = self.classes.on(device)

    def best_path(
        self, logits: torch.Tensor, forced: torch.Tensor, budget: int, state: int = START
    ) -> ConstrainedPath:
        """The likeliest tokens of a canvas with which the text can be completed.

        An engine that decodes many canvases together gives their parts to one `PathFinder` instead.

        Args:
            logits: ``[L, ids]`` on the device, the model's logits of all positions.
            forced: int64 ``[L]``, the tokens that are decided, or -1.
            budget: how many tokens may be output from this canvas on, the one that ends the text
                included.
            state: the constraint's state before the canvas.
        """
        part, one = self.part(state), torch.ones(1, dtype=torch.int64, device=self._device)
        canvas = CanvasWindow(
            state=part.place(state) * one,
            first=0 * one,
            budget=budget * one,
            width=len(forced) * one,
            forced=forced[None],
        )
        path = ConstrainedPath.empty(canvas)
        plan = self._finder.plan([PlannedCanvas(0, part.automaton, self.classes)])
        step = PathStep(plan, canvas, FreeTokens(logits.argmax(-1)[None]), path)
        self._finder.read(step, range(1), logits[None])
        self._finder.follow(step)
        return path

    @cached_property
    def _finder(self) -> PathFinder:
        return path_finder(self._device)

    def _part(self, state: int) -> Part:
        return super()._part(state).on(self._device)


class DistantSession:
    """A compiled constraint on a device whose parts an `Explorer` finds; see `Session`."""

    def __init__(
        self, explorer: Explorer, packed: bytes, length: int, device: torch.device
    ) -> None:
        self._explorer, self._life = explorer, explorer.lives[0]
        self._constraint: tuple[bytes, int] | None = packed, length  # None once it was sent
        self._device = device
        self._key = explorer.new_key(self)
        self.classes: Tables | None = None  # None until a part was found
        # By first state; the part that was used the longest time ago is first.
        self._parts: dict[int, Part] = {}
        self._host_bytes = 0

    @property
    def ended(self) -> bool:
        """Whether the process that knows this constraint has ended."""
        return self._explorer.lives[0] != self._life

    @property
    def nbytes(self) -> int:
        """See `Session`; with what the explorer's process takes."""
        on_device = [self.classes, *(part.automaton for part in self._parts.values())]
        return self._host_bytes + sum(of.numbers.nbytes for of in on_device if of is not None)

    def find(
        self, state: int, before: Sequence[int] = (), after: Sequence[int] = ()
    ) -> tuple[Part, int] | Future[Answer]:
        """See `Parts.find`; what is not known yet is in the future, for `received`."""
        if not before and not after and state in self._parts:
            part = self._parts[state] = self._parts.pop(state)
            return part, part.place(state)
        constraint, self._constraint = self._constraint, None
        asked = Question(self._key, constraint, state, before, after, self.classes is None)
        return self._explorer.ask(asked)

    def received(self, answer: Answer) -> tuple[Part, int]:
        """Keep what was found, and return the same as `Parts.find`."""
        if answer.classes is not None:
            self.classes = answer.classes.on(self._device)
        self._host_bytes, first = answer.nbytes, answer.first
        if first not in self._parts:
            self._parts[first] = answer.part.on(self._device)
        while len(self._parts) > MOST_PARTS:
            del self._parts[next(iter(self._parts))]
        return self._parts[first], answer.place
