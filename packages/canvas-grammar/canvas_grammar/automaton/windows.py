"""Select the part of a constraint's states that a canvas is decoded with.

A constraint may have more states than a step can examine, or infinitely many, because its rules
call each other. A canvas gets the nearest of those that it can reach. The distance of a state grows
with the number of calls that it is inside and the canvas' first state is not. A call that repeats
the calls around it counts little, so that lists in lists in lists stay near. A canvas cannot use
the states that are left out. The next canvas gets the states near its own beginning.

The window always includes the shortest way from the canvas' first state to the end of the text, so
a canvas always has a path.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from canvas_grammar.automaton.configurations import EMPTY_STACK, END_OF_TEXT, Configurations
from canvas_grammar.automaton.graph import DEAD, NEVER, fewest_steps
from canvas_grammar.automaton.pushdown import NO_CLASS


@dataclass(frozen=True)
class TokenAutomaton:
    """The states of a constraint that a canvas may visit. It starts in state 0. Arrays are int32.

    States are those between tokens. An edge is a pair of them with a label, which stands for the
    set of classes that lead from one to the other. Equal sets share one label. The last state is
    the end of the text, and the last class holds the tokens that end a text. In the end state only
    that class is allowed, and it leads back to the end state. From every state a text can end,
    though not always within these states.
    """

    class_of_token: np.ndarray  # ``[ids]``, or `NO_CLASS` for tokens that are never allowed
    # ``[states]``, tokens that suffice to reach the end. The token that ends the text counts, so it
    # is 1 where a text may end, and 0 in the end state.
    distance: np.ndarray
    edge_source: np.ndarray  # ``[edges]``, ascending
    edge_target: np.ndarray  # ``[edges]``, ascending for each source
    edge_label: np.ndarray  # ``[edges]``
    members: np.ndarray  # the classes of all labels, one label after the other, each ascending
    label_first: np.ndarray  # ``[labels + 1]``, where a label's classes begin in `members`
    classes: int  # including the one that ends a text

    @property
    def states(self) -> int:
        """Number of states, including the end."""
        return len(self.distance)

    def after(self, state: int, token: int) -> int:
        """The state after a token, or `DEAD` if it is not among these states."""
        kind = int(self.class_of_token[token])
        if kind == NO_CLASS or state == DEAD:
            return DEAD
        for edge in np.flatnonzero(self.edge_source == state).tolist():
            label = int(self.edge_label[edge])
            if kind in self.members[self.label_first[label] : self.label_first[label + 1]]:
                return int(self.edge_target[edge])
        return DEAD


# How much distance a call adds, and how much a call that repeats the calls around it adds.
CALL, REPEATED_CALL = 3, 1
# Calls around a call that are compared with it.
LONGEST_PERIOD = 6


@dataclass(frozen=True)
class Window:
    """A part of a constraint's states."""

    automaton: TokenAutomaton  # the states, with numbers of their own
    states: np.ndarray  # int64 ``[states]``, the number that each has in `Configurations`
    # Whether it is all states that can be reached from the first one. If so, canvases that begin
    # elsewhere may follow it, too.
    whole: bool


def window(configurations: Configurations, first: int, length: int, most: int) -> Window:
    """The states for a canvas that begins in the state `first` and may hold `length` tokens.

    It gets about `most` states; fewer where texts can be read in many ways.
    """
    shortest = _shortest_way(configurations, first, length)
    chosen, whole = _nearest(configurations, first, most, shortest)
    states = np.array(chosen, dtype=np.int64)
    states = np.append(states[states != END_OF_TEXT], END_OF_TEXT)
    number: np.ndarray = np.full(len(configurations.members), DEAD, dtype=np.int64)
    number[states] = np.arange(len(states))
    if not whole:
        source, target, _ = _edges(configurations, states, number)
        steps = fewest_steps(target, source, states == first)
        near = (steps <= length) | (states == END_OF_TEXT)
        states = states[near]
        number.fill(DEAD)
        number[states] = np.arange(len(states))
    return Window(_automaton(configurations, states, number, whole), states, whole)


def _shortest_way(configurations: Configurations, first: int, length: int) -> list[int]:
    """The states of a shortest way from a state to the end, at most `length` tokens of it."""
    way = [first]
    while len(way) <= length and way[-1] != END_OF_TEXT:
        targets = configurations.moves(way[-1]).targets.tolist()
        way.append(min(targets, key=configurations.distance.__getitem__))
    return way


def _nearest(
    configurations: Configurations, first: int, most: int, always: list[int]
) -> tuple[list[int], bool]:
    """The nearest states, with those of `always`; and whether no other one can be reached."""
    remote = _Remoteness(configurations, first)
    seen = set(always)
    chosen: list[int] = []
    # States that are equally far come in the order in which they are met.
    ahead: list[tuple[int, int, int]] = []
    next_ones, work = list(dict.fromkeys(always)), 0
    while next_ones:
        for state in next_ones:
            chosen.append(state)
            # Every way to read the text so far has to be joined with every other one.
            work += len(configurations.members[state]) ** 2
            for target in configurations.moves(state).targets.tolist():
                if target not in seen:
                    seen.add(target)
                    stack = configurations.stack_of(target)
                    heapq.heappush(ahead, (remote.of_stack(stack), len(seen), target))
        next_ones = [heapq.heappop(ahead)[2]] if ahead and work < most else []
    return chosen, not ahead


class _Remoteness:
    """How far states are from a canvas' first state, by the calls that they are inside of."""

    def __init__(self, configurations: Configurations, first: int) -> None:
        self.stacks = configurations.stacks
        self.known = {EMPTY_STACK: 0}
        stack = configurations.stack_of(first)
        while stack != EMPTY_STACK:
            self.known[stack] = 0
            stack = self.stacks.below[stack]

    def of_stack(self, stack: int) -> int:
        """The remoteness of states with this stack."""
        if stack not in self.known:
            below = self.of_stack(self.stacks.below[stack])
            self.known[stack] = below + (REPEATED_CALL if self._repeats(stack) else CALL)
        return self.known[stack]

    def _repeats(self, stack: int) -> bool:
        """Whether the calls on top of a stack are the same as those right below them."""
        calls: list[int] = []
        while stack != EMPTY_STACK and len(calls) < 2 * LONGEST_PERIOD:
            calls.append(self.stacks.back[stack])
            stack = self.stacks.below[stack]
        return any(
            calls[:period] == calls[period : 2 * period] for period in range(1, len(calls) // 2 + 1)
        )


def _edges(
    configurations: Configurations, states: np.ndarray, number: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The edges between some states: sources and targets by `number`, and labels."""
    moves = [configurations.moves(state) for state in states.tolist()]
    source: np.ndarray = np.repeat(number[states], [len(m.targets) for m in moves])
    met = np.concatenate([m.targets for m in moves])
    # States that these moves met first have no number yet.
    target = np.where(met < len(number), number[np.minimum(met, len(number) - 1)], DEAD)
    label = np.concatenate([m.labels for m in moves])
    inside = target != DEAD
    return source[inside], target[inside], label[inside]


def _automaton(
    configurations: Configurations, states: np.ndarray, number: np.ndarray, whole: bool
) -> TokenAutomaton:
    source, target, label = _edges(configurations, states, number)
    order = np.lexsort((target, source))
    source, target, label = source[order], target[order], label[order]
    used, label = np.unique(label, return_inverse=True)
    sets = [configurations.labels[n] for n in used.tolist()]
    distance = np.array([configurations.distance[n] for n in states.tolist()])
    if whole:
        # Nothing is left out, so the shortest ways are among these edges.
        exact = fewest_steps(source, target, states == END_OF_TEXT)
        distance = np.where(exact == NEVER, distance, exact)
    return TokenAutomaton(
        class_of_token=configurations.tables.class_of_token,
        distance=distance.astype(np.int32),
        edge_source=source.astype(np.int32),
        edge_target=target.astype(np.int32),
        edge_label=label.reshape(-1).astype(np.int32),
        members=np.concatenate(sets).astype(np.int32),
        label_first=np.cumsum([0, *map(len, sets)]).astype(np.int32),
        classes=configurations.tables.classes,
    )
