"""A constraint compiled for one tokenizer: what every token does to a stack of rules.

The tables are as large as the rules, not as large as the texts that they nest into.
`configurations` follows them from one stack to the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from vllm_dllm.constraints.automaton.byte_moves import byte_moves
from vllm_dllm.constraints.automaton.distance import NEVER
from vllm_dllm.constraints.automaton.outcomes import LEFT, Alternative, Outcomes
from vllm_dllm.constraints.automaton.rule_automata import RuleAutomata
from vllm_dllm.constraints.automaton.shortest import shortest_endings
from vllm_dllm.constraints.automaton.token_functions import NOTHING_READ, TokenFunctions
from vllm_dllm.constraints.automaton.vocabulary import Vocabulary
from vllm_dllm.constraints.limits import CompileLimits, ConstraintError

NO_CLASS = -1
# Every position of a canvas has one weight for each class, so more classes would decode slowly.
MOST_CLASSES = 1 << 14


@dataclass(frozen=True)
class PushdownTables:
    """What tokens do, by rule state. All arrays are int32.

    Outcomes are numbered as in `Outcomes`; those beyond the rule states are spelled out here, as
    alternatives one after the other, each with its pushed states (or its suffix) one after the
    other.

    Attributes:
        class_of_token: ``[ids]``, or `NO_CLASS` for tokens that are never allowed. The last class
            holds the tokens that end a text.
        outcome: ``[states, classes - 1]``, the outcome of a token of each class.
        suffix_outcome: ``[suffixes, states]``, the outcome of reading a rest of a token.
        first_alternative: ``[outcomes - states]``, where the alternatives of each outcome begin.
        alternative_state: ``[alternatives]``.
        first_pushed: ``[alternatives + 1]``, where the pushed states of each alternative begin.
        pushed: states, or for an alternative that leaves the number of the suffix.
        may_leave: ``[states]``, 1 where a rule may end.
        must_leave: ``[states]``, 1 where it must.
        tokens: ``[states]``, the fewest tokens to the end of the rule, see `shortest_endings`.
        calls: ``[states]``, the calls inside each other that this ending makes.
        start: ``[1]``, the state in which a text starts.
    """

    class_of_token: np.ndarray
    outcome: np.ndarray
    suffix_outcome: np.ndarray
    first_alternative: np.ndarray
    alternative_state: np.ndarray
    first_pushed: np.ndarray
    pushed: np.ndarray
    may_leave: np.ndarray
    must_leave: np.ndarray
    tokens: np.ndarray
    calls: np.ndarray
    start: np.ndarray

    @property
    def states(self) -> int:
        """Number of rule states."""
        return len(self.tokens)

    @property
    def classes(self) -> int:
        """Number of classes, including the one that ends a text."""
        return self.outcome.shape[1] + 1

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
    """From automata over bytes to tables over the tokens of a vocabulary.

    Raises:
        ConstraintError: they exceed `limits`, or these tokens cannot write any of the texts.
    """
    outcomes = Outcomes(automata.states)
    moves = byte_moves(automata, outcomes)
    functions = TokenFunctions(moves, outcomes, vocabulary, limits)
    used = np.unique(functions.of_token[functions.of_token != NOTHING_READ])
    whole = _rows(functions, used)
    tokens, calls = shortest_endings(whole.T, outcomes, moves.may_leave)
    if tokens[automata.start] == NEVER:
        raise ConstraintError("no output of the constraint can be written with this tokenizer")
    # Classes by their lowest token, so that ties go to it.
    class_of_token, order = _by_first_token(functions.of_token, used)
    if len(order) >= MOST_CLASSES:
        raise ConstraintError(
            f"the constraint is too large: {len(order) + 1} kinds of tokens, at most "
            f"{MOST_CLASSES} are served"
        )
    class_of_token[list(vocabulary.ends)] = len(order)
    whole, suffixes, alternatives = _renumbered(whole[order], functions, outcomes)
    flat = [alternative for some in alternatives for alternative in some]
    sizes = [len(pushed) for pushed, _ in flat]

    def packed(values: object) -> np.ndarray:
        return np.asarray(values, dtype=np.int32)

    return PushdownTables(
        class_of_token=packed(class_of_token),
        outcome=np.ascontiguousarray(whole.T, dtype=np.int32),
        suffix_outcome=packed(suffixes).reshape(-1, automata.states),
        first_alternative=packed(np.cumsum([0, *map(len, alternatives)])[:-1]),
        alternative_state=packed([state for _, state in flat]),
        first_pushed=packed(np.cumsum([0, *sizes])),
        pushed=packed([state for pushed, _ in flat for state in pushed]),
        may_leave=packed(moves.may_leave),
        must_leave=packed(moves.must_leave),
        tokens=packed(np.minimum(tokens, NEVER)),
        calls=packed(calls),
        start=packed([automata.start]),
    )


def _rows(functions: TokenFunctions, numbers: np.ndarray) -> np.ndarray:
    """Functions in which leaving with the whole token names it as a suffix."""
    states = len(functions.rows[0])
    if not len(numbers):
        return np.zeros((0, states), dtype=np.int32)
    return np.stack([functions.read[number] for number in numbers.tolist()])


def _by_first_token(of_token: np.ndarray, used: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The class of each token, and the places in `used` of the classes' functions."""
    place = np.searchsorted(used, of_token)
    known = of_token != NOTHING_READ
    first: np.ndarray = np.full(len(used), len(of_token), dtype=np.int64)
    np.minimum.at(first, place[known], np.flatnonzero(known))
    order = np.argsort(first, kind="stable")
    number: np.ndarray = np.empty(len(used), dtype=np.int64)
    number[order] = np.arange(len(used))
    classes: np.ndarray = np.full(len(of_token), NO_CLASS, dtype=np.int64)
    classes[known] = number[place[known]]
    return classes, order


def _renumbered(
    whole: np.ndarray, functions: TokenFunctions, outcomes: Outcomes
) -> tuple[np.ndarray, np.ndarray, list[list[Alternative]]]:
    """Keep only the outcomes and suffixes that occur, and number them anew.

    Returns:
        The rows of `whole` with new numbers, those of the suffixes, and the alternatives of the
        outcomes beyond the states.
    """
    states = outcomes.states
    kept: list[int] = []
    seen: set[int] = set()
    rows = [whole]
    ahead = np.unique(whole)
    suffix_number: dict[int, int] = {}
    while len(ahead):
        new = [n for n in ahead.tolist() if n > states and n not in seen]
        seen.update(new)
        kept += new
        suffixes = {
            pushed[0]
            for n in new
            for pushed, state in outcomes.alternatives[n]
            if state == LEFT and pushed[0] not in suffix_number
        }
        for suffix in sorted(suffixes):
            suffix_number[suffix] = len(suffix_number)
            rows.append(functions.read[suffix][None])
        ahead = np.unique(np.concatenate(rows[-len(suffixes) :])) if suffixes else np.zeros(0)
    number = np.arange(len(outcomes.alternatives))
    number[kept] = states + 1 + np.arange(len(kept))
    alternatives = [
        [
            ((suffix_number[pushed[0]],), state) if state == LEFT else (pushed, state)
            for pushed, state in outcomes.alternatives[n]
        ]
        for n in kept
    ]
    stacked = number[np.concatenate(rows)]
    return stacked[: len(whole)], stacked[len(whole) :], alternatives
