"""Sessions: constraints that canvases on a device follow.

A canvas follows a *part* of its constraint, the states near the one that the canvas begins in (see
`canvas_grammar.automaton.windows`). The states of a part have numbers of their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch

from canvas_grammar.automaton.compiled import CompiledConstraint
from canvas_grammar.automaton.configurations import START, Configurations
from canvas_grammar.automaton.windows import window
from canvas_grammar.decoding.best_path import CanvasWindow, ConstrainedPath, FreeTokens
from canvas_grammar.decoding.path_finder import PathFinder, PathStep, PlannedCanvas, path_finder
from canvas_grammar.decoding.tables import Tables, automaton_tables, class_tables, dead_state
from canvas_grammar.limits import CompileLimits

MOST_PARTS = 64  # how many parts of a constraint are cached


@dataclass(frozen=True, eq=False)
class Part:
    """The part of a constraint that a canvas follows."""

    automaton: Tables  # on the device
    states: np.ndarray  # int64 ``[states]``, the number of each of its states in the constraint
    whole: bool  # whether this is the whole constraint, so that every canvas may follow it

    def place(self, state: int) -> int:
        """The number of a constraint's state in this part, or the dead state if it is absent."""
        found = np.flatnonzero(self.states == state)
        return int(found[0]) if len(found) else dead_state(self.automaton)


class Session:
    """A compiled constraint on a device. Any number of requests may follow it.

    Everything that depends on the constraint's values is computed on the host, so nothing waits for
    the device.

    Attributes:
        configurations: the constraint's states, explored as far as canvases reach.
        classes: its classes of tokens, on the device.
    """

    def __init__(self, constraint: CompiledConstraint, length: int, device: torch.device) -> None:
        """Unpack a constraint for canvases of `length` tokens, and copy it to the device."""
        self.configurations: Configurations = constraint.configurations()
        self._length, self._device = length, device
        tables = self.configurations.tables
        self.classes = class_tables(tables.class_of_token, tables.classes).on(device)
        self._part_bytes = 0
        self._first = self._part(START)
        self._later = lru_cache(MOST_PARTS)(self._part)

    @property
    def nbytes(self) -> int:
        """About how many bytes it takes, on the host and on the device."""
        return self.configurations.nbytes + self.classes.numbers.nbytes + self._part_bytes

    def part(self, state: int = START) -> Part:
        """The part that a canvas beginning in this state follows."""
        return self._first if self._first.whole or state == START else self._later(state)

    def after(self, tokens: Iterable[int], state: int = START) -> int:
        """The constraint's state after these tokens, or `NO_STATE` if it does not allow them."""
        for token in tokens:
            state = self.configurations.after(state, token)
        return state

    def next_part(self, part: Part, place: int) -> tuple[Part, int]:
        """The part of a canvas that begins in a state of another part, and its state there."""
        if place >= dead_state(part.automaton):
            return part, dead_state(part.automaton)
        state = int(part.states[place])
        found = self.part(state)
        return found, found.place(state)

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
        most = CompileLimits().window_states
        found = window(self.configurations, state, self._length, most)
        automaton = automaton_tables(found.automaton).on(self._device)
        self._part_bytes += automaton.numbers.nbytes + found.states.nbytes
        return Part(automaton, found.states, found.whole)
