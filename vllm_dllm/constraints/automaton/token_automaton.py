"""The automaton that canvases must follow: it reads classes of tokens.

Its states are those between tokens. A table says where a token of each class leads. The same
transitions are also stored as edges for dynamic programming: a pair of states, and a label that
stands for the set of classes that lead from one to the other. Equal sets share one label.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise

import numpy as np

from vllm_dllm.constraints.automaton.byte_automaton import ByteAutomaton
from vllm_dllm.constraints.automaton.distance import DEAD, NEVER, fewest_steps, reachable
from vllm_dllm.constraints.automaton.equal_rows import equal_rows
from vllm_dllm.constraints.automaton.token_functions import token_functions
from vllm_dllm.constraints.automaton.vocabulary import Vocabulary
from vllm_dllm.constraints.limits import CompileLimits, ConstraintError

NO_CLASS = -1
# Every position of a canvas has one weight for each class, so more classes would decode slowly.
MOST_CLASSES = 1 << 14


@dataclass(frozen=True)
class TokenAutomaton:
    """A constraint compiled for one tokenizer. It starts in state 0. All arrays are int32.

    The last state is the end of the text, and the last class holds the tokens that end a text. In
    the end state only that class is allowed, and it leads back to the end state. Every state can
    reach the end.

    Attributes:
        next: ``[states, classes]``, the state after a token of a class, or `DEAD`.
        class_of_token: ``[ids]``, or `NO_CLASS` for tokens that are never allowed.
        distance: ``[states]``, the fewest tokens to the end state. The token that ends the text
            counts, so it is 1 where a text may end, and 0 in the end state.
        edge_source, edge_target, edge_label: ``[edges]``, ascending by source.
        members: the classes of all labels, one label after the other, each ascending.
        label_first: ``[labels + 1]``, where a label's classes begin in `members`.
    """

    next: np.ndarray
    class_of_token: np.ndarray
    distance: np.ndarray
    edge_source: np.ndarray
    edge_target: np.ndarray
    edge_label: np.ndarray
    members: np.ndarray
    label_first: np.ndarray

    @property
    def states(self) -> int:
        """Number of states, including the end."""
        return self.next.shape[0]

    @property
    def classes(self) -> int:
        """Number of classes, including the one that ends a text."""
        return self.next.shape[1]

    @property
    def minimum(self) -> int:
        """The fewest tokens of an output, including the one that ends it."""
        return int(self.distance[0])

    def require(self, budget: int) -> None:
        """Refuse a token budget that is too small for any output.

        Raises:
            ConstraintError: says how many tokens the shortest output takes.
        """
        if budget < self.minimum:
            raise ConstraintError(
                f"the constraint needs at least {self.minimum} tokens with this model's tokenizer "
                f"(the end-of-sequence token included), but only {budget} may be put out"
            )

    def advance(self, state: int, tokens: np.ndarray) -> int:
        """The state after some tokens, int ``[tokens]``, or `DEAD`; computed on the host."""
        for token in np.asarray(tokens).tolist():
            kind = int(self.class_of_token[token]) if state != DEAD else NO_CLASS
            state = DEAD if kind == NO_CLASS else int(self.next[state, kind])
        return state

    def to_bytes(self) -> bytes:
        """A serialized form for another process, as plain arrays: reading it runs no code."""
        return self._packed

    @cached_property
    def _packed(self) -> bytes:
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **{f.name: getattr(self, f.name) for f in fields(self)})
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> TokenAutomaton:
        """The inverse of `to_bytes`."""
        with np.load(io.BytesIO(data), allow_pickle=False) as stored:
            automaton = cls(**{f.name: stored[f.name] for f in fields(cls)})
        automaton.__dict__["_packed"] = data
        return automaton


def token_automaton(
    automaton: ByteAutomaton, vocabulary: Vocabulary, limits: CompileLimits
) -> TokenAutomaton:
    """From an automaton over bytes to one over the tokens of a vocabulary.

    Raises:
        ConstraintError: it exceeds `limits`, or these tokens cannot write any of its texts.
    """
    function_of_token, functions = token_functions(automaton, vocabulary, limits)
    used = np.unique(function_of_token[function_of_token > 0])
    table = _with_end(functions[used].T, automaton.accepting)
    table, distance = _without_dead_states(table)
    # With fewer states, further functions may be equal, and some may lead nowhere.
    first, merged = equal_rows(np.ascontiguousarray(table[:, :-1].T))
    columns = table[:, first]
    leads = (columns != DEAD).any(0)
    class_of_function: np.ndarray = np.full(len(functions), NO_CLASS, dtype=np.int32)
    leads_on = leads[merged]
    class_of_function[used[leads_on]] = (leads.cumsum() - 1)[merged[leads_on]]
    class_of_token = class_of_function[function_of_token]
    class_of_token, order = _by_first_token(class_of_token, int(leads.sum()))
    class_of_token[list(vocabulary.ends)] = len(order)
    table = np.column_stack([columns[:, leads][:, order], table[:, -1]])
    if table.shape[1] > MOST_CLASSES or table.size > limits.cells:
        raise ConstraintError(
            f"the constraint is too large: {table.shape[0]} states and {table.shape[1]} kinds of "
            f"tokens, at most {MOST_CLASSES} kinds and {limits.cells} pairs are served"
        )
    table = np.ascontiguousarray(table, dtype=np.int32)
    return TokenAutomaton(table, class_of_token, distance, *_edges(table, limits))


def _with_end(table: np.ndarray, accepting: np.ndarray) -> np.ndarray:
    """Add the end as the last state, and the class that leads to it as the last column."""
    end = len(table)
    whole: np.ndarray = np.full((end + 1, table.shape[1] + 1), DEAD, dtype=np.int32)
    whole[:end, :-1] = table
    whole[:end, -1] = np.where(accepting, end, DEAD)
    whole[end, -1] = end
    return whole


def _without_dead_states(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Remove states that tokens cannot reach or cannot finish from; also returns distances."""
    states = len(table)
    pairs = _pairs(table)
    source: np.ndarray = pairs // states
    target: np.ndarray = pairs % states
    goal: np.ndarray = np.arange(states) == states - 1
    distance = fewest_steps(source, target, goal)
    if distance[0] == NEVER:
        raise ConstraintError("no output of the constraint can be written with this tokenizer")
    alive = distance != NEVER
    inside = alive[source] & alive[target]
    alive &= reachable(source[inside], target[inside], np.arange(states) == 0)
    number: np.ndarray = np.where(alive, alive.cumsum() - 1, DEAD).astype(np.int32)
    live_rows = table[alive]
    return np.where(live_rows == DEAD, DEAD, number[live_rows]), distance[alive]


def _pairs(table: np.ndarray) -> np.ndarray:
    """Pairs of states with any class between them, ascending, as ``source * states + target``."""
    states = len(table)
    pairs = []
    for first in range(0, states, 512):
        targets = np.sort(table[first : first + 512], axis=1).astype(np.int64)
        new = targets != DEAD
        new[:, 1:] &= targets[:, 1:] != targets[:, :-1]
        row, column = np.nonzero(new)
        pairs.append((row + first) * states + targets[row, column])
    return np.concatenate(pairs)


def _by_first_token(class_of_token: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Renumber classes by their lowest token, so that ties go to it; also returns the old ones."""
    first: np.ndarray = np.full(count, len(class_of_token), dtype=np.int64)
    tokens = np.flatnonzero(class_of_token != NO_CLASS)
    np.minimum.at(first, class_of_token[tokens], tokens)
    order = np.argsort(first, kind="stable")
    number: np.ndarray = np.empty(count + 1, dtype=np.int32)
    number[order] = np.arange(count)
    number[NO_CLASS] = NO_CLASS
    return number[class_of_token], order


def _edges(table: np.ndarray, limits: CompileLimits) -> tuple[np.ndarray, ...]:
    """The edge and label arrays of a `TokenAutomaton`, from its table."""
    source, kind = np.nonzero(table != DEAD)
    target = table[source, kind].astype(np.int64)
    order = np.argsort(source * len(table) + target, kind="stable")
    source, target, kind = source[order], target[order], kind[order].astype(np.int32)
    new = (np.diff(source, prepend=-1) != 0) | (np.diff(target, prepend=-1) != 0)
    first = np.flatnonzero(new)
    if len(first) > limits.edges:
        raise ConstraintError(
            f"the constraint is too large: {len(first)} pairs of states with a token between "
            f"them, at most {limits.edges} are served"
        )
    labels: dict[bytes, int] = {}
    label, sets = [], []
    bounds = [*first.tolist(), len(kind)]
    for begin, end in pairwise(bounds):
        key = kind[begin:end].tobytes()
        if key not in labels:
            labels[key] = len(labels)
            sets.append(kind[begin:end])
        label.append(labels[key])
    sizes = np.array([0, *map(len, sets)]).cumsum()
    whole = (source[first], target[first], np.array(label), np.concatenate(sets), sizes)
    return tuple(part.astype(np.int32) for part in whole)
