"""Get from bytes to tokens: find which texts act alike in every state, and their effects.

Each text is a function from states to outcomes. A token may end a rule somewhere inside it, and its
caller then reads the rest of the token. So functions are found for all suffixes of all tokens, the
shortest first: what a suffix does is what its first byte does, followed by the function of the
rest. All tokens are followed together, one byte per round from their ends. Each byte is prepended
to each function only once: a vocabulary of 150,000 tokens has a few hundred different ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from canvas_grammar.automaton.byte_moves import (
    LEFT,
    NO_WAY,
    Alternative,
    ByteMoves,
    Followers,
    Outcomes,
)
from canvas_grammar.automaton.vocabulary import Vocabulary
from canvas_grammar.limits import CompileLimits, ConstraintError, spend

UNKNOWN = -1
# The functions of a text that no state can read, and of the empty text, which every state can read.
NOTHING_READ, EMPTY_TEXT = 0, 1


class TokenFunctions:
    """The functions of all suffixes of the tokens of a vocabulary.

    Attributes:
        of_token: int64 ``[ids]``, the function of each token; `NOTHING_READ` for one without bytes.
        read: int32 ``[functions and more, states]``, the outcomes of each function. A rule that is
            left before anything is read is left with this function's number.
    """

    def __init__(
        self,
        moves: ByteMoves,
        followers: Followers,
        outcomes: Outcomes,
        vocabulary: Vocabulary,
        limits: CompileLimits,
    ) -> None:
        """Find all functions; more than ``limits.cells`` pairs of a state and one are refused."""
        self.moves, self.outcomes, self.limits = moves, outcomes, limits
        states, width = moves.outcome.shape
        # At most one for each rest of each token. Memory that is never written is never used.
        self.most = max(min(limits.cells // states, len(vocabulary.data) + 3), 2)
        self.read: np.ndarray = np.zeros((self.most, states), dtype=np.int32)
        self.read[EMPTY_TEXT] = np.arange(1, states + 1)
        # From the states in which a function reads, and its outcomes there, to its number.
        self.number: dict[bytes, int] = {}
        self.count = 2
        self.composed: np.ndarray = np.full((64, width), UNKNOWN, dtype=np.int32)
        self.composed[NOTHING_READ] = NOTHING_READ
        self.steps = [_Step.from_outcomes(column, outcomes) for column in moves.outcome.T]
        # The states pushed above those to return to, by the outcome after the call.
        self.above: dict[tuple[tuple[int, ...], int], int] = {}
        self.forks: dict[tuple[tuple[Alternative, ...], tuple[int, ...]], int] = {}
        self.followers = followers
        self.of_token = self._of_tokens(vocabulary)

    def _of_tokens(self, vocabulary: Vocabulary) -> np.ndarray:
        lengths = np.diff(vocabulary.offsets)
        # Sorted by length, longest first: the tokens with further bytes are then always a prefix.
        order = np.argsort(-lengths, kind="stable")
        end = vocabulary.offsets[1:][order]
        # How many tokens are longer than 0, 1, 2 ... bytes.
        rounds = np.arange(lengths.max(initial=0))
        going = np.asarray(np.searchsorted(-lengths[order], -rounds, side="left"))
        current: np.ndarray = np.full(len(lengths), EMPTY_TEXT)
        for index, count in enumerate(going.tolist()):
            byte = vocabulary.data[end[:count] - 1 - index]
            current[:count] = self._after(self.moves.column_of_byte[byte], current[:count])
        current[lengths[order] == 0] = NOTHING_READ
        of_token = np.empty_like(current)
        of_token[order] = current
        return of_token

    def _after(self, column: np.ndarray, function: np.ndarray) -> np.ndarray:
        """The functions of bytes, given by column, followed by functions; all int ``[n]``."""
        numbers = self.composed[function, column]
        missing = numbers == UNKNOWN
        if missing.any():
            # The pairs by column: the same states read something in all pairs of a column.
            count = len(self.composed)
            pairs = np.unique(column[missing] * count + function[missing])
            first, after = np.divmod(pairs, count)
            for some in np.split(np.arange(len(pairs)), np.flatnonzero(np.diff(first)) + 1):
                self._compose(int(first[some[0]]), after[some])
            numbers = self.composed[function, column]
        return numbers

    def _compose(self, column: int, functions: np.ndarray) -> None:
        """Prepend a byte to functions, int ``[n]``."""
        step = self.steps[column]
        found = self.read[np.ix_(functions, step.targets)]  # [n, states that read the byte]
        spend(8 * len(found) + found.size // 64)
        self._call(step, found)
        for place, alternatives in step.forks:
            spend(16 + len(functions))
            inside = self.read[np.ix_(functions, [state for _, state in alternatives])]
            found[:, place] = NO_WAY
            for n in np.flatnonzero((inside != NO_WAY).any(1)).tolist():
                found[n, place] = self._fork(alternatives, tuple(inside[n].tolist()))
        reads = found != NO_WAY
        row, place = np.nonzero(reads)
        pairs: np.ndarray = np.empty((len(row), 2), dtype=np.int32)
        pairs[:, 0], pairs[:, 1] = step.states[place], found[reads]
        bounds = np.asarray(np.searchsorted(row, np.arange(len(functions) + 1))).tolist()
        known = self.count
        for n, function in enumerate(functions.tolist()):
            number = self._number(pairs[bounds[n] : bounds[n + 1]])
            self.composed[function, column] = number
        self._leave(known)

    def _number(self, pairs: np.ndarray) -> int:
        """The number of a function, given by pairs of a state and an outcome, int32 ``[n, 2]``."""
        if not len(pairs):
            return NOTHING_READ
        key = pairs.tobytes()
        number = self.number.setdefault(key, self.count)
        if number == self.count:
            self.count += 1
            if self.count > self.most:
                raise ConstraintError(
                    f"the constraint is too large: more than {self.limits.cells} pairs of a state "
                    "and a kind of token"
                )
            if self.count > len(self.composed):
                more = ((0, len(self.composed)), (0, 0))
                self.composed = np.pad(self.composed, more, constant_values=UNKNOWN)
            self.read[number, pairs[:, 0]] = pairs[:, 1]
        return number

    def _leave(self, first: int) -> None:
        """Make functions from `first` on leave rules, because a caller may read the whole text."""
        read = self.read[first : self.count]
        number, place = np.nonzero(self.followers.read(read != NO_WAY))
        states = self.followers.leaving[place]
        inner = read[number, states].tolist()
        read[number, states] = [
            self.outcomes.number([*self.outcomes.alternatives[outcome], ((function,), LEFT)])
            for function, outcome in zip((first + number).tolist(), inner, strict=True)
        ]

    def _call(self, step: _Step, found: np.ndarray) -> None:
        """Put the states to which calls return below what is found after the calls, in place."""
        inside = found[:, step.calls]
        row, call = np.nonzero(inside)
        # Few pairs differ, because all letters do the same in a string.
        width = len(self.outcomes.alternatives)
        pairs, which = np.unique(call * width + inside[row, call], return_inverse=True)
        done = []
        spend(len(row) // 8 + len(pairs))
        for pair in pairs.tolist():
            below, outcome = step.pushed[pair // width], pair % width
            number = self.above.get((below, outcome))
            if number is None:
                alternatives: set[Alternative] = set()
                self._return(below, outcome, alternatives)
                number = self.above[below, outcome] = self.outcomes.number(alternatives)
            done.append(number)
        found[row, step.calls[call]] = np.array(done, dtype=np.int32)[which.reshape(-1)]

    def _fork(self, alternatives: tuple[Alternative, ...], outcomes: tuple[int, ...]) -> int:
        """The outcome of several alternatives, each followed by an outcome."""
        number = self.forks.get((alternatives, outcomes))
        if number is None:
            found: set[Alternative] = set()
            for (pushed, _), outcome in zip(alternatives, outcomes, strict=True):
                self._return(pushed, outcome, found)
            number = self.forks[alternatives, outcomes] = self.outcomes.number(found)
        return number

    def _return(self, pushed: tuple[int, ...], outcome: int, found: set[Alternative]) -> None:
        """Add the alternatives of an outcome above a stack; those that leave read on below."""
        if outcome == NO_WAY:
            return
        for more, state in self.outcomes.alternatives[outcome]:
            if state == LEFT:
                if pushed:
                    self._return(pushed[:-1], int(self.read[more[0], pushed[-1]]), found)
                else:
                    found.add((more, LEFT))
                continue
            stack = (*pushed, *more)
            while stack and self.moves.must_leave[state]:
                *below, state = stack
                stack = tuple(below)
            found.add((stack, state))


@dataclass(frozen=True)
class _Step:
    """The effect of a byte in the states that read it. Arrays are int64."""

    states: np.ndarray  # ``[n]``, those states, ascending
    targets: np.ndarray  # ``[n]``, the states after the byte; any state where there are several
    calls: np.ndarray  # ``[calls]``, places in `states` where the byte is read in a called rule
    pushed: tuple[tuple[int, ...], ...]  # ``[calls]``, the states to which the calls return
    # Places in `states` where there are several alternatives, and these.
    forks: tuple[tuple[int, tuple[Alternative, ...]], ...]

    @classmethod
    def from_outcomes(cls, outcome: np.ndarray, outcomes: Outcomes) -> _Step:
        """Make a step from the outcome of the byte in every state, int ``[states]``."""
        reads = np.flatnonzero(outcome != NO_WAY)
        some = outcome[reads]
        targets = (some - 1).astype(np.int64)
        calls, pushed, forks = [], [], []
        for place in np.flatnonzero(some > outcomes.states).tolist():
            alternatives = outcomes.alternatives[some[place]]
            (below, targets[place]), *others = alternatives
            if others:
                forks.append((place, alternatives))
            else:
                calls.append(place)
                pushed.append(below)
        return cls(reads, targets, np.array(calls, dtype=np.int64), tuple(pushed), tuple(forks))
