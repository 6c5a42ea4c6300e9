"""What canvases follow: the near part of a constraint, and the classes of its tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from vllm_dllm.constraints.grammar import (
    START,
    CompiledConstraint,
    CompileLimits,
    Configurations,
    OwnEdges,
    TokenClasses,
    window,
)
from vllm_dllm.engine.to_device import to_device

# About how many states a canvas follows, and the parts of a constraint that are kept.
MOST_STATES = CompileLimits().window_states
MOST_VIEWS = 64


@dataclass(frozen=True)
class View:
    """The part of a constraint that a canvas follows.

    Attributes:
        edges: its automaton, to be joined with others; on the host.
        states: int64 ``[states]``, the number of each of its states in the constraint.
        whole: whether nothing is left out, so that every canvas may follow it.
    """

    edges: OwnEdges
    states: np.ndarray
    whole: bool

    def place(self, state: int) -> int:
        """The number of a constraint's state in this part; the dead one if it is not in it."""
        found = np.flatnonzero(self.states == state)
        return int(found[0]) if len(found) else self.edges.dead


class Follower:
    """A constraint that requests follow.

    Attributes:
        key: digest of the packed constraint.
        configurations: its states, found as far as canvases reach.
        classes: its classes of tokens, on the device.
    """

    def __init__(self, key: str, packed: bytes, length: int, device: torch.device) -> None:
        """Unpack the constraint that comes with a request, and copy its classes to the device.

        All that depends on its values is computed on the host, so that nothing waits for the
        device. `length` is L.
        """
        self.key = key
        self.length = length
        self.configurations: Configurations = CompiledConstraint(packed).configurations()
        tables = self.configurations.tables
        classes = TokenClasses.of(tables.class_of_token, tables.classes)
        self.classes = _on_device(classes, device)
        self._views: OrderedDict[int, View] = OrderedDict()
        self.view(START)

    def view(self, state: int) -> View:
        """The part that a canvas follows which begins in a state."""
        first = self._views.get(START)
        if first is not None and first.whole:
            return first
        if state not in self._views:
            found = window(self.configurations, state, self.length, MOST_STATES)
            edges = OwnEdges.of(found.automaton, found.depth)
            self._views[state] = View(edges, found.states, found.whole)
            while len(self._views) > MOST_VIEWS:
                self._views.popitem(last=False)
        self._views.move_to_end(state)
        return self._views[state]

    def after(self, tokens: Iterable[int], state: int = START) -> int:
        """The state after some tokens, or `NO_STATE`."""
        for token in tokens:
            state = self.configurations.after(state, token)
        return state

    def next_view(self, view: View, place: int) -> tuple[View, int]:
        """The view of a canvas that begins at a place of a view, and its place there."""
        if place >= view.edges.dead:
            return view, view.edges.dead
        state = int(view.states[place])
        found = self.view(state)
        return found, found.place(state)


def _on_device(classes: TokenClasses, device: torch.device) -> TokenClasses:
    """A copy with its tensors on the device."""
    named = {f.name: getattr(classes, f.name) for f in fields(classes)}
    tensors = {name: part for name, part in named.items() if isinstance(part, torch.Tensor)}
    return replace(classes, **{name: to_device(part, device) for name, part in tensors.items()})
