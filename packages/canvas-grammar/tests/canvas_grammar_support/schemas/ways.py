"""What a compiled constraint lets a text do next, in the two forms that walks need.

`Whole` asks for any state of the constraint. `Canvases` looks at the constraint as the server does:
through a window at a time, which a canvas of some tokens must not leave.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import NamedTuple, Protocol

import numpy as np
from canvas_grammar.automaton.configurations import END_OF_TEXT, START, Configurations
from canvas_grammar.automaton.graph import NEVER
from canvas_grammar.automaton.windows import TokenAutomaton, window

State = Hashable


class Ways(Protocol):
    """The states of a constraint between tokens."""

    @property
    def start(self) -> State:
        """The state before the first token."""

    @property
    def class_of_token(self) -> np.ndarray:
        """The class of each token, int ``[ids]``; negative for tokens that are never allowed."""

    def choices(self, state: State) -> list[tuple[np.ndarray, State]]:
        """Where tokens lead: the classes, int ``[classes]``, that lead to each next state.

        No class is in two of them. The token that ends a text counts as the others do.
        """

    def distance(self, state: State) -> int:
        """Tokens that are enough to end, the last one included; 0 after that one."""


class Whole:
    """All states of a constraint."""

    start: State = START

    def __init__(self, configurations: Configurations) -> None:
        self.configurations = configurations
        self.class_of_token = configurations.tables.class_of_token

    def choices(self, state: State) -> list[tuple[np.ndarray, State]]:
        """As in `Ways`."""
        assert isinstance(state, int)
        moves = self.configurations.moves(state)
        return [
            (self.configurations.labels[label], target)
            for target, label in zip(moves.targets.tolist(), moves.labels.tolist(), strict=True)
        ]

    def distance(self, state: State) -> int:
        """As in `Ways`."""
        assert isinstance(state, int)
        return self.configurations.distance[state]


class InCanvas(NamedTuple):
    """A place of a canvas.

    Attributes:
        first: the state of the constraint in which the canvas began.
        place: tokens of the canvas in front of this place.
        state: a state of the canvas' window.
    """

    first: int
    place: int
    state: int


class Canvases:
    """The states that a constraint has in canvases of `length` tokens, one canvas after another.

    A canvas is filled to its last place with states of its window, and the next one begins with the
    state after it. The distance of a place is that of the best way of which the rest of the canvas
    is in the window. What has no such way is no choice.
    """

    def __init__(self, configurations: Configurations, length: int, most: int) -> None:
        self.configurations, self.length, self.most = configurations, length, most
        self.class_of_token = configurations.tables.class_of_token
        self.windows: dict[int, tuple[TokenAutomaton, np.ndarray, list[np.ndarray]]] = {}
        self.whole = False
        self.start: State = InCanvas(START, 0, 0)

    def choices(self, state: State) -> list[tuple[np.ndarray, State]]:
        """As in `Ways`."""
        return list(self._choices(state))

    def distance(self, state: State) -> int:
        """As in `Ways`."""
        assert isinstance(state, InCanvas)
        return int(self._window(state.first)[2][self.length - state.place][state.state])

    def _choices(self, state: State) -> Iterator[tuple[np.ndarray, State]]:
        assert isinstance(state, InCanvas)
        automaton, _, _ = self._window(state.first)
        first, last = np.searchsorted(automaton.edge_source, [state.state, state.state + 1])
        for edge in range(first, last):
            begin, end = automaton.label_first[automaton.edge_label[edge] :][:2]
            target = InCanvas(state.first, state.place + 1, int(automaton.edge_target[edge]))
            if self.distance(target) == NEVER:
                continue
            if target.place == self.length:
                target = self._after(target)
            yield automaton.members[begin:end], target

    def _after(self, last: InCanvas) -> InCanvas:
        """The begin of the next canvas, which has a window of its own if the first is not whole."""
        if self.whole:
            return InCanvas(START, 0, last.state)
        return InCanvas(int(self._window(last.first)[1][last.state]), 0, 0)

    def _window(self, first: int) -> tuple[TokenAutomaton, np.ndarray, list[np.ndarray]]:
        """A window, its states' numbers, and by places left the distances, int ``[states]``."""
        if first not in self.windows:
            found = window(self.configurations, first, self.length, self.most)
            self.whole = self.whole or (first == START and found.whole)
            automaton = found.automaton
            enough = [automaton.distance.astype(np.int64)]
            ended = found.states == END_OF_TEXT
            for _ in range(self.length):
                ahead = np.full(automaton.states, NEVER, dtype=np.int64)
                np.minimum.at(ahead, automaton.edge_source, enough[-1][automaton.edge_target])
                enough.append(np.where(ended, 0, np.minimum(ahead + 1, NEVER)))
            self.windows[first] = automaton, found.states, enough
        return self.windows[first]
