"""From a language to a deterministic automaton that reads bytes.

`outlines_core` builds it, as an index over a vocabulary of the 256 bytes. Its index is made for
whole matches, and two properties of it would be errors here: an edge from an accepting to a
non-accepting state is lost (of ``a(bc)?`` nothing is left behind the a), and of ``a|ab`` only the
first option is followed. Both happen only behind a match. So a byte that no text contains is
appended to the expression: a match then ends with it, and a state accepts where it can be read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import chain

import numpy as np
from outlines_core import Index, Vocabulary

from vllm_dllm.constraints.automaton.distance import DEAD, NEVER, fewest_steps, reachable
from vllm_dllm.constraints.automaton.equal_rows import equal_rows
from vllm_dllm.constraints.grammar.language import Node, written
from vllm_dllm.constraints.limits import CompileLimits, ConstraintError

SENTINEL = 0  # no language contains U+0000
# Each round joins what alternatives have in common one byte further from their end.
MOST_ROUNDS = 64


@dataclass(frozen=True)
class ByteAutomaton:
    """A deterministic automaton over bytes; it starts in state 0.

    Attributes:
        next: int32 ``[states, 256]``, the state behind a byte, or `DEAD`. From every state a text
            can be finished.
        accepting: bool ``[states]``, a text may end here.
    """

    next: np.ndarray
    accepting: np.ndarray


def byte_automaton(language: Node, limits: CompileLimits) -> ByteAutomaton:
    """A small automaton of a language.

    Raises:
        ConstraintError: the language is empty, or too large for `limits`.
    """
    expression = written(language, limits)
    try:
        index = Index(rf"(?:{expression})\x{SENTINEL:02x}", _bytes())
    except (ValueError, OverflowError) as error:
        raise ConstraintError(f"the constraint cannot become an automaton: {error}") from error
    table = _table(index.get_transitions(), index.get_initial_state(), limits.byte_states)
    accepting = table[:, SENTINEL] != DEAD
    table[:, SENTINEL] = DEAD
    # Many bytes act alike everywhere; one of each kind is enough for all that follows.
    first, column_of_byte = equal_rows(np.ascontiguousarray(table.T))
    columns, accepting = _smaller(*_alive(table[:, first], accepting))
    return ByteAutomaton(columns[:, column_of_byte], accepting)


@cache
def _bytes() -> Vocabulary:
    return Vocabulary(256, {bytes([byte]): [byte] for byte in range(256)})


def _table(transitions: dict[int, dict[int, int]], start: int, most: int) -> np.ndarray:
    """Rows of the states, the start first; ids of states become numbers of rows."""
    if len(transitions) > most:
        raise ConstraintError(
            f"the constraint is too large: {len(transitions)} states over bytes, at most {most} "
            "are served"
        )
    ids = np.fromiter(transitions, dtype=np.int64, count=len(transitions))
    counts = [len(edges) for edges in transitions.values()]
    byte, target = (
        np.fromiter(chain.from_iterable(part), dtype=np.int64, count=sum(counts))
        for part in (transitions.values(), (edges.values() for edges in transitions.values()))
    )
    # The start becomes the first.
    order = np.argsort(np.where(ids == start, -1, ids))
    row_of = np.argsort(order)
    by_id = np.argsort(ids)
    source = row_of[np.repeat(np.arange(len(ids)), counts)]
    target = row_of[by_id[np.searchsorted(ids[by_id], target)]]
    table: np.ndarray = np.full((len(ids), 257), DEAD, dtype=np.int32)
    table[source, byte] = target  # a match' edge on 256, the end for outlines_core, is dropped
    return np.ascontiguousarray(table[:, :256])


def _alive(table: np.ndarray, accepting: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Without states from which no text can be finished, or that no text leads to."""
    source, byte = np.nonzero(table != DEAD)
    target = table[source, byte]
    start: np.ndarray = np.arange(len(table)) == 0
    alive = fewest_steps(source, target, accepting) != NEVER
    alive &= reachable(source, target, start)
    if not alive[0]:
        raise ConstraintError("the constraint allows no output at all")
    number: np.ndarray = np.where(alive, alive.cumsum() - 1, DEAD).astype(np.int32)
    kept = table[alive]
    return np.where(kept == DEAD, DEAD, number[kept]), accepting[alive]


def _smaller(table: np.ndarray, accepting: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """With equal states joined, and then those that have become equal by that.

    From the end on, that joins what alternatives have in common. The least automaton may be
    smaller where states go in circles, but finding it takes as many rounds as a text is long.
    """
    for _ in range(MOST_ROUNDS):
        first, number = equal_rows(np.column_stack([table, accepting]))
        if len(first) == len(table):
            break
        kept = table[first]
        table, accepting = np.where(kept == DEAD, DEAD, number[kept]), accepting[first]
    return table.astype(np.int32), accepting
