"""Compile a constraint for one tokenizer into the effect of every token on a stack of rules.

The size of the tables depends on the rules, not on the texts that they nest into.
`configurations` follows them from one stack to the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from canvas_grammar.automaton.byte_moves import LEFT, Alternative, Followers, Outcomes, byte_moves
from canvas_grammar.automaton.graph import NEVER
from canvas_grammar.automaton.rule_automata import RuleAutomata
from canvas_grammar.automaton.token_functions import NOTHING_READ, TokenFunctions
from canvas_grammar.automaton.vocabulary import Vocabulary
from canvas_grammar.limits import CompileLimits, ConstraintError


def shortest_endings(
    state: np.ndarray, outcome: np.ndarray, outcomes: Outcomes, may_leave: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """How a rule ends soonest from each state, if every call in it ends at the edge of a token.

    The number of tokens to the end of a whole text is then the sum over its rules. It is never too
    small. It may be too large, because a token may also end several rules at once.

    Args:
        state: int ``[n]``, states in which some token can be read.
        outcome: int ``[n]``, an outcome of it.
        outcomes: the numbers of outcomes.
        may_leave: bool ``[states]``, whether a rule may end in a state.

    Returns:
        The tokens, int64 ``[states]``, `NEVER` where there is no such ending; and the calls inside
        each other that this ending makes, int64 ``[states]``.
    """
    ways = _Ways.from_edges(state, outcome, outcomes, len(may_leave))
    total: np.ndarray = np.ones(ways.count, dtype=np.int64)
    depth: np.ndarray = np.zeros(ways.count, dtype=np.int64)
    missing = np.bincount(ways.way, minlength=ways.count)
    tokens: np.ndarray = np.where(may_leave, 0, NEVER).astype(np.int64)
    calls: np.ndarray = np.zeros(len(may_leave), dtype=np.int64)
    waiting: dict[int, list[np.ndarray]] = {}
    now, count = np.flatnonzero(may_leave), 0
    while True:
        places, _ = _members(ways.first, now)
        some = ways.way[places]
        np.add.at(total, some, tokens[ways.state[places]])
        np.maximum.at(depth, some, calls[ways.state[places]] + ways.level[places])
        np.subtract.at(missing, some, 1)
        done = np.unique(some)
        done = done[missing[done] == 0]
        for value in np.unique(total[done]).tolist():
            waiting.setdefault(value, []).append(done[total[done] == value])
        now = np.zeros(0, dtype=np.int64)
        while waiting and not len(now):
            count = min(waiting)
            ready = np.concatenate(waiting.pop(count))
            edges, sizes = _members(ways.edge_first, ready)
            source = ways.edge_state[edges]
            deep: np.ndarray = np.repeat(depth[ready], sizes)
            fresh = tokens[source] == NEVER
            source, deep = source[fresh], deep[fresh]
            # Of equally short endings, the one that makes the fewest calls.
            order = np.lexsort((deep, source))
            now, chosen = np.unique(source[order], return_index=True)
            tokens[now], calls[now] = count, deep[order[chosen]]
        if not len(now):
            return tokens, calls


def _members(first: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The places of the members of some groups, int64 ``[n]``, and how many each group has.

    `first`, int64 ``[all groups + 1]``, is where the members of each group begin.
    """
    sizes = first[groups + 1] - first[groups]
    begin: np.ndarray = np.repeat(first[groups] - (sizes.cumsum() - sizes), sizes)
    return begin + np.arange(sizes.sum()), sizes


@dataclass(frozen=True)
class _Ways:
    """Ways to continue: states that must all end, and the states from which a token leads there.

    Way ``n`` is that of rule state ``n`` alone; others follow. Arrays are int64.
    """

    count: int  # of ways
    first: np.ndarray  # ``[states + 1]``, where each state begins in the next three
    state: np.ndarray  # ``[n]``
    way: np.ndarray  # ``[n]``, a way that the state is part of
    level: np.ndarray  # ``[n]``, how many calls are open while it is read
    edge_first: np.ndarray  # ``[ways + 1]``, where each way begins in the next one
    edge_state: np.ndarray  # ``[edges]``, a state from which a token leads to the way

    @classmethod
    def from_edges(
        cls, state: np.ndarray, outcome: np.ndarray, outcomes: Outcomes, states: int
    ) -> _Ways:
        """Find the ways of edges, which are as in `shortest_endings`."""
        # From the outermost state to the innermost one.
        special = [
            [(*pushed, inner) for pushed, inner in some if inner != LEFT]
            for some in outcomes.alternatives[1 + states :]
        ]
        longer = [part for some in special for part in some]
        members = [*range(states), *(member for part in longer for member in part)]
        lengths = np.array([1] * states + [len(part) for part in longer], dtype=np.int64)
        way: np.ndarray = np.repeat(np.arange(len(lengths)), lengths)
        level = np.concatenate([np.zeros(states), *(np.arange(len(part)) for part in longer)])
        flat = np.array(members, dtype=np.int64)
        order = np.argsort(flat, kind="stable")
        first = np.asarray(np.searchsorted(flat[order], np.arange(states + 1)))
        # The ways of each outcome: a plain one has the way of its state.
        counts = np.array([0] + [1] * states + [len(some) for some in special], dtype=np.int64)
        # Neighbours are often equal: tokens inside a string all do the same.
        new = (np.diff(state, prepend=-1) != 0) | (np.diff(outcome, prepend=-1) != 0)
        pairs = np.unique(state[new].astype(np.int64) * len(counts) + outcome[new])
        source, number = np.divmod(pairs, len(counts))
        target, sizes = _members(np.concatenate([[0], counts.cumsum()]), number)
        source = np.repeat(source, sizes)
        by_target = np.argsort(target, kind="stable")
        edge_first = np.asarray(np.searchsorted(target[by_target], np.arange(len(lengths) + 1)))
        return cls(
            len(lengths), first, flat[order], way[order], level.astype(np.int64)[order],
            edge_first, source[by_target],
        )  # fmt: skip


NO_CLASS = -1
STATES_AT_ONCE = 1024  # so that no copy of a whole table is made
# Every position of a canvas has one weight for each class, so more classes would decode slowly.
MOST_CLASSES = 1 << 14


@dataclass(frozen=True)
class PushdownTables:
    """The effects of tokens in each rule state. All arrays are int32.

    Outcomes are numbered as in `Outcomes`; those beyond the rule states are spelled out here, as
    alternatives one after the other, each with its pushed states (or its suffix) one after the
    other. Nothing is stored for a token that leads nowhere. The last class of tokens holds those
    that end a text.
    """

    class_of_token: np.ndarray  # ``[ids]``, or `NO_CLASS` for tokens that are never allowed
    token_first: np.ndarray  # ``[states + 1]``, where the tokens that each state can read begin
    token_class: np.ndarray  # a class of tokens, ascending
    token_outcome: np.ndarray  # its outcome
    suffix_first: np.ndarray  # ``[states + 1]``, where the suffixes that each state can read begin
    suffix: np.ndarray  # a suffix of a token, ascending
    suffix_outcome: np.ndarray  # its outcome
    first_alternative: np.ndarray  # ``[outcomes - states]``, where those of each outcome begin
    alternative_state: np.ndarray  # ``[alternatives]``
    first_pushed: np.ndarray  # ``[alternatives + 1]``, where each alternative's pushed states begin
    pushed: np.ndarray  # states, or for an alternative that leaves the number of the suffix
    may_leave: np.ndarray  # ``[states]``, 1 where a rule may end
    must_leave: np.ndarray  # ``[states]``, 1 where it must
    tokens: np.ndarray  # ``[states]``, the fewest to the end of the rule, see `shortest_endings`
    calls: np.ndarray  # ``[states]``, the calls inside each other that this ending makes
    start: np.ndarray  # ``[1]``, the state in which a text starts
    sizes: np.ndarray  # ``[2]``, the number of classes, and of suffixes

    @property
    def states(self) -> int:
        """Number of rule states."""
        return len(self.tokens)

    @property
    def classes(self) -> int:
        """Number of classes, including the one that ends a text."""
        return int(self.sizes[0])

    def outcomes(self, state: int) -> np.ndarray:
        """The outcome of a token of each class but the last, int32 ``[classes - 1]``."""
        row: np.ndarray = np.zeros(self.classes - 1, dtype=np.int32)
        some = slice(*self.token_first[state : state + 2].tolist())
        row[self.token_class[some]] = self.token_outcome[some]
        return row

    def suffix_outcomes(self, state: int) -> np.ndarray:
        """The outcome of each suffix, int32 ``[suffixes]``."""
        row: np.ndarray = np.zeros(int(self.sizes[1]), dtype=np.int32)
        some = slice(*self.suffix_first[state : state + 2].tolist())
        row[self.suffix[some]] = self.suffix_outcome[some]
        return row

    @cached_property
    def alternatives(self) -> list[tuple[Alternative, ...]]:
        """The alternatives of every outcome, as in `Outcomes`."""
        pushed, bounds = self.pushed.tolist(), self.first_pushed.tolist()
        whole = [
            (tuple(pushed[bounds[n] : bounds[n + 1]]), state)
            for n, state in enumerate(self.alternative_state.tolist())
        ]
        first = [*self.first_alternative.tolist(), len(whole)]
        return [
            (),
            *((((), state),) for state in range(self.states)),
            *(tuple(whole[first[n] : first[n + 1]]) for n in range(len(first) - 1)),
        ]


def pushdown_tables(
    automata: RuleAutomata, vocabulary: Vocabulary, limits: CompileLimits
) -> PushdownTables:
    """Turn automata over bytes into tables over the tokens of a vocabulary.

    Tables that exceed `limits` are refused, and tokens that cannot write any of the texts.
    """
    outcomes = Outcomes(automata.states)
    moves = byte_moves(automata, outcomes)
    followers = Followers.from_automata(automata, moves.may_leave)
    functions = TokenFunctions(moves, followers, outcomes, vocabulary, limits)
    used = np.unique(functions.of_token[functions.of_token != NOTHING_READ])
    # Classes by their lowest token, so that ties go to it.
    class_of_token, order = _by_first_token(functions.of_token, used)
    if len(order) >= MOST_CLASSES:
        raise ConstraintError(
            f"the constraint is too large: {len(order) + 1} kinds of tokens, at most "
            f"{MOST_CLASSES} are served"
        )
    class_of_token[list(vocabulary.ends)] = len(order)
    whole = _Sparse.from_functions(functions.read, used[order])
    tokens, calls = shortest_endings(whole.state, whole.outcome, outcomes, moves.may_leave)
    if tokens[automata.start] == NEVER:
        raise ConstraintError("no output of the constraint can be written with this tokenizer")
    kept, suffixes, rest = _used(whole, functions, outcomes)
    number: np.ndarray = np.arange(len(outcomes.alternatives))
    number[kept] = automata.states + 1 + np.arange(len(kept))
    place = {suffix: n for n, suffix in enumerate(suffixes)}
    alternatives = [
        [((place[p[0]],), s) if s == LEFT else (p, s) for p, s in outcomes.alternatives[n]]
        for n in kept
    ]
    flat = [alternative for some in alternatives for alternative in some]

    def packed(values: object) -> np.ndarray:
        return np.asarray(values, dtype=np.int32)

    return PushdownTables(
        class_of_token=packed(class_of_token),
        token_first=packed(whole.first(automata.states)),
        token_class=packed(whole.column),
        token_outcome=packed(number[whole.outcome]),
        suffix_first=packed(rest.first(automata.states)),
        suffix=packed(rest.column),
        suffix_outcome=packed(number[rest.outcome]),
        first_alternative=packed(np.cumsum([0, *map(len, alternatives)])[:-1]),
        alternative_state=packed([state for _, state in flat]),
        first_pushed=packed(np.cumsum([0, *(len(pushed) for pushed, _ in flat)])),
        pushed=packed([state for pushed, _ in flat for state in pushed]),
        may_leave=packed(moves.may_leave),
        must_leave=packed(moves.must_leave),
        tokens=packed(tokens),
        calls=packed(calls),
        start=packed([automata.start]),
        sizes=packed([len(order) + 1, len(suffixes)]),
    )


@dataclass(frozen=True)
class _Sparse:
    """The states in which functions read something, by state and column; int64 ``[n]``."""

    state: np.ndarray
    column: np.ndarray  # the place of a function
    outcome: np.ndarray

    @classmethod
    def from_functions(cls, read: np.ndarray, functions: np.ndarray) -> _Sparse:
        """Of some functions, int64 ``[columns]``; `read` is that of `TokenFunctions`."""
        parts = []
        for begin in range(0, read.shape[1], STATES_AT_ONCE):
            some = read[:, begin : begin + STATES_AT_ONCE][functions].T
            state, column = np.nonzero(some)
            parts.append((begin + state, column, some[state, column].astype(np.int64)))
        return cls(*(np.concatenate(part) for part in zip(*parts, strict=True)))

    def first(self, states: int) -> np.ndarray:
        """Where each state begins, int64 ``[states + 1]``."""
        return np.asarray(np.searchsorted(self.state, np.arange(states + 1)))


def _by_first_token(of_token: np.ndarray, used: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The class of each token, and the places in `used` of the classes' functions."""
    place: np.ndarray = np.asarray(np.searchsorted(used, of_token))
    known = of_token != NOTHING_READ
    first: np.ndarray = np.full(len(used), len(of_token), dtype=np.int64)
    np.minimum.at(first, place[known], np.flatnonzero(known))
    order = np.argsort(first, kind="stable")
    number: np.ndarray = np.empty(len(used), dtype=np.int64)
    number[order] = np.arange(len(used))
    classes: np.ndarray = np.full(len(of_token), NO_CLASS, dtype=np.int64)
    classes[known] = number[place[known]]
    return classes, order


def _used(
    whole: _Sparse, functions: TokenFunctions, outcomes: Outcomes
) -> tuple[list[int], list[int], _Sparse]:
    """The outcomes of tokens beyond the states, including what follows the rules that they leave.

    With them come the functions of the suffixes, and what suffixes lead to.
    """
    kept: list[int] = []
    suffixes: dict[int, None] = {}
    occurs: np.ndarray = np.zeros(len(outcomes.alternatives), dtype=bool)
    occurs[whole.outcome] = True
    seen: np.ndarray = np.arange(len(occurs)) <= outcomes.states
    while (occurs & ~seen).any():
        new = np.flatnonzero(occurs & ~seen).tolist()
        seen |= occurs
        kept += new
        left = {p[0] for n in new for p, state in outcomes.alternatives[n] if state == LEFT}
        more = sorted(left - set(suffixes))
        suffixes.update(dict.fromkeys(more))
        for suffix in more:
            occurs[functions.read[suffix]] = True
    names = list(suffixes)
    return kept, names, _Sparse.from_functions(functions.read, np.array(names, dtype=np.int64))
