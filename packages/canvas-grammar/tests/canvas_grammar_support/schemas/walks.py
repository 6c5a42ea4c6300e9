"""Random walks through a compiled constraint, token by token: what a canvas could put out."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random

import numpy as np
from canvas_grammar.automaton.vocabulary import Vocabulary

from canvas_grammar_support.schemas.ways import State, Ways

STRUCTURE = frozenset(b'{}[]",:')
# What a walk prefers; one of these is drawn for a walk, and another one now and then on the way.
HABITS = ("new", "edges", "classes", "tokens", "structure")
CHANGES_HABIT = 0.1
STATES_PER_OUTPUT = 20  # that are searched for edges that no walk took


class StuckError(AssertionError):
    """A walk that did not end in time, although `distance` says that the budget is enough."""


@dataclass(frozen=True)
class Edge:
    """A way out of a state.

    Attributes:
        classes: the classes that lead there.
        target: the next state.
        tokens: how many tokens these classes have.
        structural: those of the classes that have a token with a bracket, quote, comma or colon.
    """

    classes: tuple[int, ...]
    target: State
    tokens: int
    structural: tuple[int, ...]


class Walker:
    """Walks through one compiled constraint, and remembers which edges they took.

    Raises:
        StuckError: in each method, if a walk cannot go on.
        ValueError: a token without bytes is allowed, or a class leads to two states at once.
    """

    def __init__(self, ways: Ways, vocabulary: Vocabulary, seed: int) -> None:
        self.ways, self.vocabulary, self.random = ways, vocabulary, Random(seed)
        self.class_of_token, self.ends = ways.class_of_token, frozenset(vocabulary.ends)
        lengths = np.diff(vocabulary.offsets)
        silent = np.flatnonzero((lengths == 0) & (self.class_of_token >= 0)).tolist()
        if set(silent) - self.ends:
            raise ValueError(f"tokens without bytes are allowed: {silent}")
        used = np.flatnonzero(self.class_of_token >= 0)
        order = used[np.argsort(self.class_of_token[used], kind="stable")]
        count = int(self.class_of_token.max(initial=-1)) + 1
        first = np.searchsorted(self.class_of_token[order], np.arange(count + 1))
        self.tokens_of_class = [order[a:b] for a, b in pairwise(first)]
        structural = np.isin(vocabulary.data, list(STRUCTURE)).cumsum()
        before = np.concatenate([[0], structural])[vocabulary.offsets]
        has = (np.diff(before) > 0) & (lengths > 0)
        self.structural = {int(kind) for kind in np.unique(self.class_of_token[has])}
        self.edges: dict[State, list[Edge]] = {}
        self.visits: Counter[tuple[State, int]] = Counter()

    @property
    def minimum(self) -> int:
        """Tokens that are enough for an output, including the one that ends it."""
        return self.ways.distance(self.ways.start)

    def tokens(self, budget: int) -> list[int]:
        """The tokens of one random output of at most `budget` tokens, the end included."""
        state, left, found = self.ways.start, budget, list[int]()
        habit = self.random.choice(HABITS)
        while self.ways.distance(state) > 0:
            if self.random.random() < CHANGES_HABIT:
                habit = self.random.choice(HABITS)
            left -= 1
            number, kind = self._chosen(state, self._open_to(state, left, found), habit)
            state = self._take(state, number, kind, found)
        return self._ended(found)

    def cover(self, most: int) -> Iterator[list[int]]:
        """Outputs over edges that no walk took, one such edge each, and at most `most` outputs."""
        came_from = self._explored(STATES_PER_OUTPUT * most)
        untaken = [
            (state, number)
            for state in came_from
            for number in range(len(self._edges_from(state)))
            if self.ways.distance(state) > 0 and not self.visits[state, number]
        ]
        self.random.shuffle(untaken)
        for state, number in untaken[:most]:
            if self.visits[state, number]:  # on the way to another one
                continue
            way = [(state, number)]
            while (step := came_from[way[-1][0]]) is not None:
                way.append(step)
            found: list[int] = []
            for at, edge in reversed(way):
                kind = self.random.choice(self._edges_from(at)[edge].classes)
                state = self._take(at, edge, kind, found)
            while left := self.ways.distance(state):
                number, kind = self._chosen(state, self._open_to(state, left - 1, found), "edges")
                state = self._take(state, number, kind, found)
            yield self._ended(found)

    def text(self, tokens: Sequence[int]) -> bytes:
        """What tokens write."""
        offsets, data = self.vocabulary.offsets, self.vocabulary.data
        return b"".join(data[offsets[t] : offsets[t + 1]].tobytes() for t in tokens)

    def accepts(self, tokens: Sequence[int]) -> bool:
        """Whether these tokens are allowed, one after the other."""
        state = self.ways.start
        for token in tokens:
            kind = int(self.class_of_token[token])
            after = [e.target for e in self._edges_from(state) if kind in e.classes]
            if not after:
                return False
            (state,) = after
        return True

    def _edges_from(self, state: State) -> list[Edge]:
        if state not in self.edges:
            self.edges[state] = [
                Edge(
                    tuple(classes.tolist()),
                    target,
                    sum(len(self.tokens_of_class[kind]) for kind in classes.tolist()),
                    tuple(kind for kind in classes.tolist() if kind in self.structural),
                )
                for classes, target in self.ways.choices(state)
            ]
            classes = [kind for edge in self.edges[state] for kind in edge.classes]
            if len(set(classes)) < len(classes):
                raise ValueError(f"a class leads to two states from state {state}")
        return self.edges[state]

    def _explored(self, most: int) -> dict[State, tuple[State, int] | None]:
        """The states nearest to the start, with the edge that each was found by."""
        came_from: dict[State, tuple[State, int] | None] = {self.ways.start: None}
        todo = deque(came_from)
        while todo and len(came_from) < most:
            state = todo.popleft()
            for number, edge in enumerate(self._edges_from(state)):
                if edge.target not in came_from:
                    came_from[edge.target] = (state, number)
                    todo.append(edge.target)
        return came_from

    def _open_to(self, state: State, left: int, found: list[int]) -> list[int]:
        """The edges after which `left` tokens are enough."""
        edges = self._edges_from(state)
        open_to = [n for n, e in enumerate(edges) if self.ways.distance(e.target) <= left]
        if not open_to:
            raise StuckError(f"no token of {left + 1} leads on from {self.text(found)!r}")
        return open_to

    def _take(self, state: State, number: int, kind: int, found: list[int]) -> State:
        self.visits[state, number] += 1
        found.append(int(self.random.choice(self.tokens_of_class[kind])))
        return self._edges_from(state)[number].target

    def _ended(self, found: list[int]) -> list[int]:
        if not found or [token for token in found if token in self.ends] != found[-1:]:
            raise StuckError(f"the end is not the last token of {found}")
        return found

    def _chosen(self, state: State, open_to: list[int], habit: str) -> tuple[int, int]:
        """The number of an edge, and one of its classes."""
        edges = self._edges_from(state)
        random = self.random
        if habit == "structure":
            open_to = [n for n in open_to if edges[n].structural] or open_to
            number = random.choice(open_to)
            return number, random.choice(edges[number].structural or edges[number].classes)
        if habit == "new":
            least = min(self.visits[state, n] for n in open_to)
            number = random.choice([n for n in open_to if self.visits[state, n] == least])
        elif habit == "edges":
            number = random.choice(open_to)
        else:
            sizes = [
                edges[n].tokens if habit == "tokens" else len(edges[n].classes) for n in open_to
            ]
            (number,) = random.choices(open_to, sizes)
        classes = edges[number].classes
        if habit == "tokens":
            weights = [len(self.tokens_of_class[kind]) for kind in classes]
            return number, random.choices(classes, weights)[0]
        return number, random.choice(classes)
