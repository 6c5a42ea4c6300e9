"""The parts of a constraint, as tables.

A canvas follows a *part* of its constraint, the states near the one that the canvas begins in (see
`canvas_grammar.automaton.windows`). The states of a part have numbers of their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from canvas_grammar.automaton.compiled import CompiledConstraint
from canvas_grammar.automaton.configurations import NO_STATE, START, Configurations
from canvas_grammar.automaton.tables import Tables, automaton_tables, class_tables, dead_state
from canvas_grammar.automaton.windows import window
from canvas_grammar.limits import CompileLimits

if TYPE_CHECKING:
    import torch

MOST_PARTS = 64  # how many parts of a constraint are cached


@dataclass(frozen=True, eq=False)
class Part:
    """The part of a constraint that a canvas follows."""

    automaton: Tables
    states: np.ndarray  # int64 ``[states]``, the number of each of its states in the constraint
    whole: bool  # whether this is the whole constraint, so that every canvas may follow it

    def state(self, place: int) -> int:
        """The constraint's number of a state of this part; `NO_STATE` for the dead one."""
        return int(self.states[place]) if place < len(self.states) else NO_STATE

    def place(self, state: int) -> int:
        """The number of a constraint's state in this part, or the dead state if it is absent."""
        found = np.flatnonzero(self.states == state)
        return int(found[0]) if len(found) else dead_state(self.automaton)

    def on(self, device: torch.device) -> Part:
        """The same part on a device."""
        return replace(self, automaton=self.automaton.on(device))


class Parts:
    """The parts of a compiled constraint for canvases of `length` tokens, on the host.

    Attributes:
        configurations: the constraint's states, explored as far as canvases reach.
        classes: its classes of tokens.
    """

    def __init__(self, constraint: CompiledConstraint, length: int) -> None:
        self.configurations: Configurations = constraint.configurations()
        tables = self.configurations.tables
        self.classes = class_tables(tables.class_of_token, tables.classes)
        self._length, self._part_bytes = length, 0
        self._first = self._part(START)
        self._later = lru_cache(MOST_PARTS)(self._part)

    @property
    def nbytes(self) -> int:
        """About how many bytes it takes."""
        return self.configurations.nbytes + self.classes.numbers.nbytes + self._part_bytes

    def part(self, state: int = START) -> Part:
        """The part that a canvas beginning in this state follows."""
        return self._first if self._first.whole or state == START else self._later(state)

    def after(self, tokens: Iterable[int], state: int = START) -> int:
        """The constraint's state after these tokens, or `NO_STATE` if it does not allow them."""
        for token in tokens:
            state = self.configurations.after(state, token)
        return state

    def find(
        self, state: int, before: Iterable[int] = (), after: Iterable[int] = ()
    ) -> tuple[Part, int]:
        """The part of a canvas, and the state there after the tokens that the canvas has already.

        The canvas begins after the tokens `before` from a state on, and has the tokens `after`.
        """
        first = self.after(before, state)
        part = self.part(START if first == NO_STATE else first)
        return part, part.place(NO_STATE if first == NO_STATE else self.after(after, first))

    def _part(self, state: int) -> Part:
        most = CompileLimits().window_states
        found = window(self.configurations, state, self._length, most)
        automaton = automaton_tables(found.automaton)
        self._part_bytes += automaton.numbers.nbytes + found.states.nbytes
        return Part(automaton, found.states, found.whole)
