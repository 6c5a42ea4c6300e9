"""Build tables of automata over bytes with `outlines_core`, and prune, merge and combine them.

A table has a row for each state and a column for each byte. `outlines_core` builds it, as an index
over a vocabulary of the 256 bytes. Two properties of that index would be errors here: it loses
edges from accepting to non-accepting states (of ``a(bc)?``, nothing remains after the ``a``), and
of ``a|ab`` it follows only the first option. Both happen only after a match. So every expression
must end with a text that none of its texts contains; see `rule_automata`.

It also lists the texts that an expression may begin with, which takes ten times as long for every
further digit of ``[1-9][0-9]{20}``. It stops at a set of many characters, so one is prepended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from itertools import chain

import numpy as np
from outlines_core import Index, Vocabulary

from canvas_grammar.automaton.graph import DEAD, edges_of, equal_rows
from canvas_grammar.grammar.language import Chain, Node, Repeat
from canvas_grammar.limits import ConstraintError, spend

SYMBOL = 0  # the byte that symbols begin with
END = 0x7F  # the byte after it that stands for the end of a rule
# Each round merges the common endings that cycles are in up to one byte further from the end.
MOST_ROUNDS = 64


@cache
def _bytes() -> Vocabulary:
    return Vocabulary(256, {bytes([byte]): [byte] for byte in range(256)})


def expression_table(expression: str, most_states: int) -> np.ndarray:
    """Return the automaton of an expression, int32 ``[states, 256]``, with the start in row 0.

    It is in the syntax of Rust's ``regex`` crate; none of its texts may begin another one. More
    than `most_states` are refused.
    """
    try:
        index = Index(f"[a-z]{expression}", _bytes())
    except (ValueError, OverflowError) as error:
        raise ConstraintError(f"the constraint cannot become an automaton: {error}") from error
    transitions = index.get_transitions()
    check_states(len(transitions), most_states)
    spend(500 + 30 * len(transitions))
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
    """Refuse more states than a cap."""
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
    """Merge states with equal rows repeatedly, because merging makes further rows equal.

    This merges the common endings of alternatives, but not states in cycles. Returned are the
    smaller table, and the state of each old one, int64 ``[old states]``.
    """
    spend(16 * len(table))
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
    """Merge all states that read the same texts and cannot reach a cycle, ends first.

    If lists or strings have different maximum lengths, short ones are endings of long ones.
    """
    source, target = edges_of(table)
    ahead = np.bincount(source, minlength=len(table))  # targets that are not merged yet
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
    number = (np.cumsum(kept) - 1)[number]
    return renumbered(table[kept], number), number


# ---- Tables of long chains, put together from the tables of their parts.
#
# The time that `outlines_core` takes grows with the square of an object's optional members,
# and with every copy of what is repeated. Here each part becomes a table once. Chains are put
# together from their ends: an optional part is a choice between the part with all that follows it,
# and what follows alone. Only the bytes that both of them can read first are examined.

# Chains with fewer copies of parts are left to `outlines_core`.
FEWEST_COPIES = 16
# Parts of fewer byte positions are not separate pieces, unless they are repeated.
LEAST_POSITIONS = 4
MOST_PAIRS = 4096  # pairs that a choice examines

Piece = tuple[Node, int, int]  # a part, and how often it may come at least and at most


def chain_table(
    node: Node, plain: Callable[[Node], np.ndarray], most_states: int
) -> np.ndarray | None:
    """The table of a chain with many pieces, or None where `outlines_core` should build it.

    `plain` makes a table of a part, as `expression_table` of the part and the symbol of the end.
    More than `most_states` are refused.
    """
    pieces = list(_pieces(node))
    if sum(most - 1 + (least < most) for _, least, most in pieces) < FEWEST_COPIES:
        return None
    chain = _Chain(most_states)
    try:
        start = chain.end()
        for part, least, most in reversed(pieces):
            start = chain.repeated(plain(part), start, least, most)
    except _AmbiguousError:
        return None
    return chain.table(start)


def _pieces(node: Node) -> Iterable[Piece]:
    """The parts of a chain; adjacent parts that are not repeated are one piece."""
    once: list[Node] = []
    for part in _parts(node):
        most = part.most if isinstance(part, Repeat) else None
        if most is None or (most == 1 and part.positions < LEAST_POSITIONS):
            once.append(part)
            continue
        if once:
            yield Chain(tuple(once)), 1, 1
            once = []
        assert isinstance(part, Repeat)
        yield part.part, part.least, most
    if once:
        yield Chain(tuple(once)), 1, 1


def _parts(node: Node) -> Iterable[Node]:
    if isinstance(node, Chain):
        for part in node.parts:
            yield from _parts(part)
    else:
        yield node


class _AmbiguousError(Exception):
    """The next byte does not show whether a part ends."""


class _Chain:
    """A growing table. All its states lead to the symbol of the end."""

    def __init__(self, most_states: int) -> None:
        self.most_states = most_states
        self.rows: np.ndarray = np.full((256, 256), DEAD, dtype=np.int32)
        self.count = 0

    def end(self) -> int:
        """A state that reads only the symbol of the end."""
        first = self._new(3)
        self.rows[first, SYMBOL] = first + 1
        self.rows[first + 1, END] = first + 2
        return first

    def repeated(self, table: np.ndarray, after: int, least: int, most: int) -> int:
        """The start of `least` to `most` repetitions, followed by what starts in `after`."""
        part = _Part(table)
        start = after
        for _ in range(most - least):
            start = self._either(self._before(part, start), after)
        for _ in range(least):
            start = self._before(part, start)
        return start

    def table(self, start: int) -> np.ndarray:
        """The table with its start in row 0."""
        number: np.ndarray = np.arange(self.count, dtype=np.int32)
        number[[0, start]] = start, 0
        return renumbered(self.rows[number], number)

    def _new(self, states: int) -> int:
        first = self.count
        self.count += states
        check_states(self.count, self.most_states)
        if self.count > len(self.rows):
            more = max(len(self.rows), states)
            self.rows = np.pad(self.rows, ((0, more), (0, 0)), constant_values=DEAD)
        return first

    def _before(self, part: _Part, after: int) -> int:
        """The start of a part, followed by what starts in `after`."""
        first = self._new(len(part.rows))
        number = part.number + first
        number[part.last] = after
        rows = renumbered(part.rows, number)
        following = self.rows[after]
        for state in part.may_end.tolist():
            if ((rows[state] != DEAD) & (following != DEAD)).any():
                raise _AmbiguousError
            rows[state] = np.maximum(rows[state], following)
        self.rows[first : first + len(rows)] = rows
        return int(number[0])

    def _either(self, one: int, two: int) -> int:
        """The start of a choice between what starts in one state and what starts in another."""
        number: dict[tuple[int, int], int] = {(one, two): self._new(1)}
        ahead = [(one, two)]
        for pair in ahead:  # grows while it is read
            spend(16)
            left, right = self.rows[pair[0]], self.rows[pair[1]]
            row = np.where(left == DEAD, right, left)
            for byte in np.flatnonzero((left != DEAD) & (right != DEAD) & (left != right)).tolist():
                both = int(left[byte]), int(right[byte])
                if both not in number:
                    if len(ahead) == MOST_PAIRS:
                        raise _AmbiguousError
                    number[both] = self._new(1)
                    ahead.append(both)
                row[byte] = number[both]
            self.rows[number[pair]] = row
        return number[one, two]


class _Part:
    """The table of a part without the symbol of the end.

    Attributes:
        rows: int32 ``[states, 256]``, of the states in which something is read.
        number: int32 ``[old states]``, the place in `rows` of each state of the part's table.
        last: bool ``[old states]``, states in which the part must end.
        may_end: int64, places in `rows` of states in which it may end or go on.
    """

    def __init__(self, table: np.ndarray) -> None:
        # It is ambiguous if the part ends where it may also call a rule, or has no text.
        symbol = table[:, SYMBOL]
        ends = (symbol != DEAD) & (table[symbol, END] != DEAD)
        reads = table != DEAD
        after = np.unique(symbol[ends])
        if (reads[after].sum(1) > 1).any():
            raise _AmbiguousError
        table = table.copy()
        table[ends, SYMBOL] = DEAD
        reads = table != DEAD
        self.last = ends & ~reads.any(1)
        kept = reads.any(1)
        kept[after] = False
        if not (kept[0] or self.last[0]):
            raise _AmbiguousError
        # States that are not kept are `last`, or the symbol's, to which nothing leads any more.
        self.number = np.where(kept, kept.cumsum() - 1, 0).astype(np.int32)
        self.rows = table[kept]
        self.may_end = np.flatnonzero((ends & kept)[kept])
