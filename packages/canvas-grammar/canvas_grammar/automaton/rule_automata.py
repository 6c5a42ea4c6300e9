"""Turn a language with rules into automata over bytes that call each other.

Every rule becomes one automaton, however often it is called. Calls and ends are written into its
expression as symbols that begin with a byte 0, which no text contains: ``00 7f`` is the end, and
two other bytes are the number of what is called. So a rule with calls is still a regular
expression, and `outlines_core` builds its automaton. A mark is ``00 7e`` and its number there, and
`MARK_BYTE` and its number in an automaton. Intersections and differences are products of
two automata, and are called like rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from canvas_grammar.automaton.byte_tables import (
    END,
    SYMBOL,
    chain_table,
    check_states,
    expression_table,
    kept_states,
    merged_states,
)
from canvas_grammar.automaton.graph import DEAD, alive_states, used_states
from canvas_grammar.automaton.vocabulary import MARK_BYTE
from canvas_grammar.grammar.json.values import names_a_place
from canvas_grammar.grammar.language import Node, as_expression, check_size
from canvas_grammar.grammar.marks import Mark
from canvas_grammar.grammar.rules import (
    REMEMBERED,
    Automaton,
    Both,
    Call,
    Without,
    WithoutFirst,
    node_id,
)
from canvas_grammar.limits import CompileLimits, ConstraintError, spend

MESSAGE = "the constraint allows no output at all"


class EmptyLanguageError(ConstraintError):
    """A language has no text at all.

    `rules` are the numbers of its rules without any text, those of outer rules first, and `nodes`
    what these rules are, once that is known.
    """

    def __init__(self, rules: list[int], place: str = "", nodes: Sequence[Node] = ()) -> None:
        super().__init__(f"{place}: {MESSAGE}" if place else MESSAGE)
        self.rules, self.nodes = rules, nodes

    def named(self, nodes: Sequence[Node]) -> EmptyLanguageError:
        """The same error with the place of the innermost rule that has one in a schema."""
        empty = [nodes[rule] for rule in self.rules]
        names = [node.rule.name for node in empty if isinstance(node, Call)]
        places = [name for name in names if names_a_place(name)]
        return EmptyLanguageError(self.rules, places[-1] if places else "", empty)


# Symbols of calls are a byte below `MARK` and one below `END`, neither of which is 0.
MARK = BASE = END - 1
MOST_RULES = (MARK - 1) * BASE


@dataclass(frozen=True)
class RuleAutomata:
    """The automata of all rules of a language. Every state can reach the end of its rule."""

    next: np.ndarray  # int32 ``[states, 256]``, the state after a byte, or `DEAD`
    accepting: np.ndarray  # bool ``[states]``, whether the rule of a state may end there
    # int32 ``[calls, 3]``, ascending: the state that calls, the state in which the called rule
    # starts, and the state of the caller after the call.
    calls: np.ndarray
    start: int  # the state in which the whole language starts

    @property
    def states(self) -> int:
        """Number of states."""
        return len(self.accepting)


def rule_automata(language: Node, limits: CompileLimits) -> RuleAutomata:
    """The automata of a language, which must not be empty, and of all rules that it calls."""
    builder = _Builder(limits)
    table, starts = builder.table(language)
    table, number = merged_states(table)
    try:
        return _decoded(table, number[starts])
    except EmptyLanguageError as error:
        raise error.named(builder.nodes) from None


@lru_cache(REMEMBERED)  # a language may be one side of many products
def regular_automaton(language: Node, limits: CompileLimits) -> RuleAutomata | None:
    """The automaton of a language without calls of rules, or None if the language is empty."""
    try:
        found = rule_automata(language, limits)
    except EmptyLanguageError:
        return None
    return found if not len(found.calls) else _without_calls(found, limits)


class _Builder:
    """Builds the tables of a language's rules, each one once."""

    def __init__(self, limits: CompileLimits) -> None:
        self.limits = limits
        self.number: dict[int, int] = {}
        self.nodes: list[Node] = []

    def table(self, language: Node) -> tuple[np.ndarray, np.ndarray]:
        """The tables of all rules, stacked vertically, and where each rule starts."""
        self._numbered(language)
        tables: list[np.ndarray] = []
        starts: list[int] = []
        states = 0
        for node in self.nodes:  # grows while rules are read
            table, start = self._table(node)
            if states + len(table) > self.limits.byte_states and tables:
                # Rules share endings, so only what is left after merging counts.
                merged, number = merged_states(np.concatenate(tables))
                tables, starts, states = [merged], number[starts].tolist(), len(merged)
            tables.append(np.where(table == DEAD, DEAD, table + states))
            starts.append(states + start)
            states += len(table)
            check_states(states, self.limits.byte_states)
        return np.concatenate(tables), np.array(starts)

    def _symbol(self, node: Node) -> str:
        """The expression of a mark, or of a call of a node."""
        if isinstance(node, Mark):
            return rf"\x{SYMBOL:02x}\x{MARK:02x}[\x{node.first:02x}-\x{node.last:02x}]"
        high, low = divmod(self._numbered(node), BASE)
        return rf"\x{SYMBOL:02x}\x{high + 1:02x}\x{low + 1:02x}"

    def _numbered(self, node: Node) -> int:
        """The number of a node; rules are known by their identity."""
        number = self.number.setdefault(node_id(node), len(self.nodes))
        if number == len(self.nodes):
            if number == MOST_RULES:
                raise ConstraintError(f"the constraint has more than {MOST_RULES} rules")
            self.nodes.append(node)
        return number

    def _table(self, node: Node) -> tuple[np.ndarray, int]:
        """The table of what a symbol stands for, and its start."""
        if isinstance(node, Both | Without):
            return _product(node, self.limits), 0
        if isinstance(node, Automaton):
            return _with_ends(_table_of(node), np.array(node.accepting)), 0
        if isinstance(node, WithoutFirst):
            table = self._plain(node.rest)
            start = 0
            for byte in node.first.encode():
                start = int(table[start, byte]) if start != DEAD else DEAD
            # A start that leads nowhere means that the rule is empty.
            dead: np.ndarray = np.full((1, 256), DEAD, dtype=np.int32)
            return (table, start) if start != DEAD else (dead, 0)
        return self._plain(node.rule.body if isinstance(node, Call) else node), 0

    def _plain(self, node: Node) -> np.ndarray:
        if node.empty:
            return np.full((1, 256), DEAD, dtype=np.int32)
        check_size(node, self.limits)
        table = chain_table(node, self._plain, self.limits.byte_states)
        if table is not None:
            return table
        expression = as_expression(node, self.limits, self._symbol)
        return expression_table(
            rf"(?:{expression})\x{SYMBOL:02x}\x{END:02x}", self.limits.byte_states
        )


def _table_of(node: Automaton) -> np.ndarray:
    """The moves of a language that is given as an automaton, int32 ``[states, 256]``."""
    table: np.ndarray = np.full((len(node.moves), 256), DEAD, dtype=np.int32)
    for state, moves in enumerate(node.moves):
        for character, target in moves.items():
            table[state, ord(character)] = target
    return table


def _decoded(table: np.ndarray, starts: np.ndarray) -> RuleAutomata:
    """Read the symbols in a table, int32 ``[states, 256]``, and remove what leads nowhere.

    `starts`, int64 ``[rules]``, are where each rule starts.
    """
    table = np.vstack([table, np.full((1, 256), DEAD, dtype=np.int32)])  # row -1: dead
    symbol = table[:, SYMBOL]
    accepting = table[symbol, END] != DEAD
    high = table[symbol]
    marked = high[:-1, MARK].copy()
    high[:, [MARK, END]] = DEAD
    caller, first = np.nonzero(high != DEAD)
    low = table[high[caller, first]]
    which, second = np.nonzero(low != DEAD)
    rule = (first[which] - 1) * BASE + second - 1
    calls = np.column_stack([caller[which], starts[rule], low[which, second]])
    moves = table[:-1].copy()
    moves[:, SYMBOL] = DEAD
    moves[:, MARK_BYTE] = np.maximum(moves[:, MARK_BYTE], marked)  # products have read theirs
    accepting = accepting[:-1]
    calls = calls[calls[:, 0] < len(moves)]
    alive = alive_states(moves, accepting, calls)
    if not alive[starts[0]]:
        raise EmptyLanguageError(np.flatnonzero(~alive[starts]).tolist())
    calls = calls[alive[calls].all(1)]
    used = used_states(moves, calls, alive, int(starts[0]))
    calls = calls[used[calls].all(1)]
    number: np.ndarray = np.cumsum(used) - 1
    calls = np.unique(number[calls], axis=0).astype(np.int32).reshape(-1, 3)
    return RuleAutomata(kept_states(moves, used), accepting[used], calls, int(number[starts[0]]))


def _product(node: Both | Without, limits: CompileLimits) -> np.ndarray:
    """The table of an intersection or a difference, with the symbol of the end."""
    dead: np.ndarray = np.full((1, 256), DEAD, dtype=np.int32)
    left = regular_automaton(node.left, limits)
    right = regular_automaton(node.right, limits)
    both = isinstance(node, Both)
    if left is None or (right is None and both):
        return dead
    if right is None:
        right = RuleAutomata(dead, np.zeros(1, dtype=bool), np.zeros((0, 3), dtype=np.int32), 0)
    # The last row of each is a separate dead state, because a text that the right side has left may
    # still belong to a difference.
    sides = [np.vstack([side.next, dead]) for side in (left, right)]
    sizes = [len(side) for side in sides]
    sides = [
        np.where(side == DEAD, size - 1, side).astype(np.int64)
        for side, size in zip(sides, sizes, strict=True)
    ]
    known: dict[int, int] = {}
    frontier = np.array([left.start * sizes[1] + right.start])
    known[int(frontier[0])] = 0
    rows: list[np.ndarray] = []
    pairs = [frontier]
    while len(frontier):
        spend(64 + 16 * len(frontier))
        one, two = np.divmod(frontier, sizes[1])
        after = sides[0][one] * sizes[1] + sides[1][two]  # [frontier, 256]
        gone = sides[0][one] == sizes[0] - 1
        if both:
            gone |= sides[1][two] == sizes[1] - 1
        after[gone] = DEAD
        rows.append(after)
        new = [pair for pair in np.unique(after[after != DEAD]).tolist() if pair not in known]
        for pair in new:
            known[pair] = len(known)
        check_states(len(known), limits.byte_states)
        frontier = np.array(new, dtype=np.int64)
        pairs.append(frontier)
    visited = np.concatenate(pairs)
    one, two = np.divmod(visited, sizes[1])
    ends = [np.append(side.accepting, False) for side in (left, right)]
    accepting = ends[0][one] & (ends[1][two] if both else ~ends[1][two])
    order = np.argsort(visited)
    table = np.concatenate(rows)
    place = order[np.searchsorted(visited[order], np.maximum(table, 0)).clip(0, len(order) - 1)]
    return _with_ends(np.where(table == DEAD, DEAD, place), accepting)


def _with_ends(table: np.ndarray, accepting: np.ndarray) -> np.ndarray:
    """A table with the symbol of the end after every accepting state."""
    states = len(table)
    whole: np.ndarray = np.full((states + 2, 256), DEAD, dtype=np.int32)
    whole[:states] = table
    whole[:states, SYMBOL] = np.where(accepting, states, DEAD)
    whole[states, END] = states + 1
    return whole


def _without_calls(automata: RuleAutomata, limits: CompileLimits) -> RuleAutomata:
    """One automaton without calls, for rules that never call themselves.

    Its states are sets of configurations: a state, and the states to return to.
    """
    by_caller: dict[int, list[tuple[int, int]]] = {}
    for caller, start, back in automata.calls.tolist():
        by_caller.setdefault(caller, []).append((start, back))

    def closed(configurations: set[tuple[int, ...]]) -> frozenset[tuple[int, ...]]:
        found: set[tuple[int, ...]] = set()
        ahead = list(configurations)
        while ahead:
            configuration = ahead.pop()
            if configuration in found:
                continue
            found.add(configuration)
            *stack, state = configuration
            ahead += [(*stack, back, start) for start, back in by_caller.get(state, ())]
            if automata.accepting[state] and stack:
                ahead.append(tuple(stack))
        return frozenset(found)

    first = closed({(automata.start,)})
    number, ordered, rows = {first: 0}, [first], []
    for configurations in ordered:  # grows while it is read
        spend(64 * len(configurations))
        row: np.ndarray = np.full(256, DEAD, dtype=np.int32)
        moves = automata.next[[c[-1] for c in configurations]]
        stacks = [c[:-1] for c in configurations]
        for byte in np.flatnonzero((moves != DEAD).any(0)).tolist():
            column = moves[:, byte].tolist()
            after = closed({(*s, t) for s, t in zip(stacks, column, strict=True) if t != DEAD})
            if after not in number:
                number[after] = len(ordered)
                ordered.append(after)
                check_states(len(ordered), limits.byte_states)
            row[byte] = number[after]
        rows.append(row)
    accepting = np.array([any(len(c) == 1 and automata.accepting[c[0]] for c in configurations)
                          for configurations in ordered])  # fmt: skip
    return RuleAutomata(np.stack(rows), accepting, np.zeros((0, 3), dtype=np.int32), 0)
