"""From a regular language to a deterministic automaton over bytes.

`outlines_core` builds it, as an index over a vocabulary of the 256 bytes. Two properties of that
index would be errors here: it loses edges from accepting to non-accepting states (of ``a(bc)?``,
nothing remains after the ``a``), and of ``a|ab`` it follows only the first option. Both happen only
after a match. So a sentinel byte that no text contains is appended to the expression: every match
then ends with the sentinel, and a state is accepting if it can read the sentinel.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import chain

import numpy as np
from outlines_core import Index, Vocabulary

from vllm_dllm.constraints.automaton.distance import DEAD, NEVER, fewest_steps, reachable
from vllm_dllm.constraints.automaton.equal_rows import equal_rows
from vllm_dllm.constraints.grammar.language import Node, as_expression
from vllm_dllm.constraints.limits import CompileLimits, ConstraintError

SENTINEL = 0  # no language contains U+0000
# Each round merges the common endings of alternatives up to one byte further from the end.
MOST_ROUNDS = 64


@dataclass(frozen=True)
class ByteAutomaton:
    """A deterministic automaton over bytes; it starts in state 0.

    Attributes:
        next: int32 ``[states, 256]``, the state after a byte, or `DEAD`. Every state can reach an
            accepting one.
        accepting: bool ``[states]``, whether a text may end there.
    """

    next: np.ndarray
    accepting: np.ndarray


def byte_automaton(language: Node, limits: CompileLimits) -> ByteAutomaton:
    """The automaton of a language, with equal states merged.

    Raises:
        ConstraintError: the language is empty, or too large for `limits`.
    """
    expression = as_expression(language, limits)
    try:
        index = Index(rf"(?:{expression})\x{SENTINEL:02x}", _bytes())
    except (ValueError, OverflowError) as error:
        raise ConstraintError(f"the constraint cannot become an automaton: {error}") from error
    table = _table(index.get_transitions(), index.get_initial_state(), limits.byte_states)
    accepting = table[:, SENTINEL] != DEAD
    table[:, SENTINEL] = DEAD
    # Many bytes lead to the same state from every state; one of each kind is enough from here on.
    first, column_of_byte = equal_rows(np.ascontiguousarray(table.T))
    columns, accepting = _merge_equal_states(*_without_dead_states(table[:, first], accepting))
    return ByteAutomaton(columns[:, column_of_byte], accepting)


@cache
def _bytes() -> Vocabulary:
    return Vocabulary(256, {bytes([byte]): [byte] for byte in range(256)})


def _table(transitions: dict[int, dict[int, int]], start: int, most_states: int) -> np.ndarray:
    """The transition table, with the start state in row 0."""
    if len(transitions) > most_states:
        raise ConstraintError(
            f"the constraint is too large: {len(transitions)} states over bytes, at most "
            f"{most_states} are served"
        )
    ids = np.fromiter(transitions, dtype=np.int64, count=len(transitions))
    counts = [len(edges) for edges in transitions.values()]
    byte, target = (
        np.fromiter(chain.from_iterable(part), dtype=np.int64, count=sum(counts))
        for part in (transitions.values(), (edges.values() for edges in transitions.values()))
    )
    # Sort the rows so that the start comes first.
    order = np.argsort(np.where(ids == start, -1, ids))
    row_of = np.argsort(order)
    by_id = np.argsort(ids)
    source = row_of[np.repeat(np.arange(len(ids)), counts)]
    target = row_of[by_id[np.searchsorted(ids[by_id], target)]]
    table: np.ndarray = np.full((len(ids), 257), DEAD, dtype=np.int32)
    table[source, byte] = target  # column 256, the end token of outlines_core, is dropped
    return np.ascontiguousarray(table[:, :256])


def _without_dead_states(table: np.ndarray, accepting: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Remove states that cannot be reached, or from which no accepting state can be reached."""
    source, byte = np.nonzero(table != DEAD)
    target = table[source, byte]
    start: np.ndarray = np.arange(len(table)) == 0
    alive = fewest_steps(source, target, accepting) != NEVER
    alive &= reachable(source, target, start)
    if not alive[0]:
        raise ConstraintError("the constraint allows no output at all")
    number: np.ndarray = np.where(alive, alive.cumsum() - 1, DEAD).astype(np.int32)
    live_rows = table[alive]
    return np.where(live_rows == DEAD, DEAD, number[live_rows]), accepting[alive]


def _merge_equal_states(table: np.ndarray, accepting: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Merge states with equal rows, again and again, because merging makes further rows equal.

    This merges the common endings of alternatives. It is not a full minimization, which could also
    merge states in cycles but takes as many rounds as the longest text has bytes.
    """
    for _ in range(MOST_ROUNDS):
        first, number = equal_rows(np.column_stack([table, accepting]))
        if len(first) == len(table):
            break
        rows = table[first]
        table, accepting = np.where(rows == DEAD, DEAD, number[rows]), accepting[first]
    return table.astype(np.int32), accepting
