"""Tables of automata over bytes: built by `outlines_core`, pruned, merged and combined.

A table has a row for each state and a column for each byte. `outlines_core` builds it, as an index
over a vocabulary of the 256 bytes. Two properties of that index would be errors here: it loses
edges from accepting to non-accepting states (of ``a(bc)?``, nothing remains after the ``a``), and
of ``a|ab`` it follows only the first option. Both happen only after a match. So every expression
must end with a text that none of its texts contains; see `rule_automata`.

A third property is only slow: `outlines_core` lists the texts that an expression may begin with,
which takes ten times as long for every further digit of ``[1-9][0-9]{20}``. It stops at a set of
many characters. So such a set is put in front, and the automaton starts behind it.
"""

from __future__ import annotations

from functools import cache
from itertools import chain

import numpy as np
from outlines_core import Index, Vocabulary

from canvas_grammar.automaton.distance import DEAD
from canvas_grammar.automaton.equal_rows import equal_rows
from canvas_grammar.limits import ConstraintError

SYMBOL = 0  # the byte with which symbols begin
END = 0x7F  # the byte behind it that stands for the end of a rule
# Each round merges the common endings that cycles are in up to one byte further from the end.
MOST_ROUNDS = 64


@cache
def _bytes() -> Vocabulary:
    return Vocabulary(256, {bytes([byte]): [byte] for byte in range(256)})


def expression_table(expression: str, most_states: int) -> np.ndarray:
    """The automaton of an expression, int32 ``[states, 256]``, with the start in row 0.

    Args:
        expression: of Rust's ``regex`` crate; none of its texts is the beginning of another one.
        most_states: the largest number of states.

    Raises:
        ConstraintError: it has more states, or is no expression for `outlines_core`.
    """
    try:
        index = Index(f"[a-z]{expression}", _bytes())
    except (ValueError, OverflowError) as error:
        raise ConstraintError(f"the constraint cannot become an automaton: {error}") from error
    transitions = index.get_transitions()
    check_states(len(transitions), most_states)
    ids = np.fromiter(transitions, dtype=np.int64, count=len(transitions))
    counts = [len(edges) for edges in transitions.values()]
    byte, target = (
        np.fromiter(chain.from_iterable(part), dtype=np.int64, count=sum(counts))
        for part in (transitions.values(), (edges.values() for edges in transitions.values()))
    )
    start = transitions[index.get_initial_state()][ord("a")]
    # Sort the rows so that the start comes first.
    order = np.argsort(np.where(ids == start, -1, ids))
    row_of = np.argsort(order)
    by_id = np.argsort(ids)
    source = row_of[np.repeat(np.arange(len(ids)), counts)]
    target = row_of[by_id[np.searchsorted(ids[by_id], target)]]
    table: np.ndarray = np.full((len(ids), 257), DEAD, dtype=np.int32)
    table[source, byte] = target  # column 256, the end token of outlines_core, is dropped
    return np.ascontiguousarray(table[:, :256])


def check_states(count: int, most: int) -> None:
    """Refuse more states than a cap.

    Raises:
        ConstraintError: says how many there are.
    """
    if count > most:
        raise ConstraintError(
            f"the constraint is too large: {count} states over bytes, at most {most} are served"
        )


def kept_states(table: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """The rows of the states that are `kept`, bool ``[states]``, renumbered; others are dead."""
    return renumbered(table[kept], np.where(kept, kept.cumsum() - 1, DEAD))


def renumbered(rows: np.ndarray, number: np.ndarray) -> np.ndarray:
    """Rows with other numbers of states, int32; `number` is int ``[old states]``."""
    # `DEAD` is -1, the last place.
    renumbered: np.ndarray = np.append(number, DEAD).astype(np.int32)[rows]
    return renumbered


def merged_states(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Merge states with equal rows, again and again, because merging makes further rows equal.

    This merges the common endings of alternatives. It is not a full minimization, which could also
    merge states in cycles.

    Returns:
        The smaller table, and the state of each old one, int64 ``[old states]``.
    """
    # Many bytes lead to the same state from every state; one of each kind is enough here.
    columns, column_of_byte = equal_rows(np.ascontiguousarray(table.T))
    small, whole = _merged_endings(np.ascontiguousarray(table[:, columns]))
    for _ in range(MOST_ROUNDS):
        first, number = equal_rows(small)
        if len(first) == len(small):
            break
        small = renumbered(small[first], number)
        whole = number[whole]
    return small[:, column_of_byte], whole


def _merged_endings(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Merge all states that read the same texts and cannot reach a cycle, from the ends on.

    Of lists or strings with various largest lengths, the short ones are endings of the long ones.

    Returns:
        As `merged_states`.
    """
    ordered = np.sort(table, axis=1)
    new = ordered != DEAD
    new[:, 1:] &= ordered[:, 1:] != ordered[:, :-1]
    source, column = np.nonzero(new)
    target = ordered[source, column]
    ahead = new.sum(1)  # targets that are not merged yet
    by_target = np.argsort(target, kind="stable")
    into = source[by_target]
    first = np.asarray(np.searchsorted(target[by_target], np.arange(len(table) + 1)))
    number: np.ndarray = np.arange(len(table))
    known: dict[bytes, int] = {}
    ready = np.flatnonzero(ahead == 0)
    while len(ready):
        rows = np.where(table[ready] == DEAD, DEAD, number[table[ready]])
        for state, row in zip(ready.tolist(), rows, strict=True):
            number[state] = known.setdefault(row.tobytes(), state)
        places = [np.arange(first[state], first[state + 1]) for state in ready.tolist()]
        before = into[np.concatenate(places)]
        np.subtract.at(ahead, before, 1)
        ready = np.unique(before[ahead[before] == 0])
    kept = number == np.arange(len(table))
    place = np.cumsum(kept) - 1
    number = place[number]
    return renumbered(table[kept], number), number
