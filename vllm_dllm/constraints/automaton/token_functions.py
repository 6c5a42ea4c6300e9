"""From bytes to tokens: which texts act alike in every state, and what they do there.

Each text is a function from states to outcomes. A token may end a rule somewhere inside it, and its
caller then reads the rest of the token. So functions are found for all suffixes of all tokens, the
shortest first: what a suffix does is what its first byte does, followed by the function of what is
behind it. All tokens are followed together, one byte per round from their ends. Equal functions are
recognized by their whole contents, so suffixes with the same function do act alike, and each byte
is put in front of each function only once. A vocabulary of 150,000 tokens has a few hundred
different functions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm_dllm.constraints.automaton.byte_moves import ByteMoves
from vllm_dllm.constraints.automaton.followers import Followers
from vllm_dllm.constraints.automaton.outcomes import LEFT, NO_WAY, Alternative, Outcomes
from vllm_dllm.constraints.automaton.vocabulary import Vocabulary
from vllm_dllm.constraints.limits import CompileLimits, ConstraintError

UNKNOWN = -1
# No text can be read in any state, the empty text can in all.
NOTHING_READ, EMPTY_TEXT = 0, 1


class TokenFunctions:
    """The functions of all suffixes of the tokens of a vocabulary.

    Attributes:
        outcomes: the numbers of outcomes.
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
        """Find all functions.

        Raises:
            ConstraintError: more than ``limits.cells`` pairs of a state and a function.
        """
        self.moves, self.outcomes, self.limits = moves, outcomes, limits
        states, width = moves.outcome.shape
        self.most = max(limits.cells // states, 2)
        self.read: np.ndarray = np.zeros((min(64, self.most), states), dtype=np.int32)
        self.read[EMPTY_TEXT] = np.arange(1, states + 1)
        # From the states in which a function reads, and its outcomes there, to its number.
        self.number: dict[tuple[bytes, bytes], int] = {}
        self.count = 2
        self.composed: np.ndarray = np.full((64, width), UNKNOWN, dtype=np.int32)
        self.composed[NOTHING_READ] = NOTHING_READ
        self.steps = [_Step.of(column, states) for column in moves.outcome.T]
        self.through: dict[tuple[int, int], int] = {}
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
            current[:count] = self._behind(self.moves.column_of_byte[byte], current[:count])
        current[lengths[order] == 0] = NOTHING_READ
        of_token = np.empty_like(current)
        of_token[order] = current
        return of_token

    def _behind(self, column: np.ndarray, function: np.ndarray) -> np.ndarray:
        """The functions of a byte, given by its column, in front of functions; all int ``[n]``."""
        numbers = self.composed[function, column]
        missing = numbers == UNKNOWN
        if missing.any():
            # The pairs by column: the same states read something in all pairs of a column.
            count = len(self.composed)
            pairs = np.unique(column[missing] * count + function[missing])
            first, behind = np.divmod(pairs, count)
            for some in np.split(np.arange(len(pairs)), np.flatnonzero(np.diff(first)) + 1):
                self._compose(int(first[some[0]]), behind[some])
            numbers = self.composed[function, column]
        return numbers

    def _compose(self, column: int, functions: np.ndarray) -> None:
        """Put a byte in front of functions, int ``[n]``."""
        step = self.steps[column]
        found = self.read[np.ix_(functions, step.targets)]  # [n, states that read the byte]
        for place, move in step.calls:
            found[:, place] = [self._after_call(move, function) for function in functions.tolist()]
        known = self.count
        for function, outcomes in zip(functions.tolist(), found, strict=True):
            number = self._number(step.states, outcomes)  # may make `composed` larger
            self.composed[function, column] = number
        self._leave(known)

    def _number(self, states: np.ndarray, outcomes: np.ndarray) -> int:
        """The number of a function, given by its outcomes in the states in which it reads."""
        reads = outcomes != NO_WAY
        if not reads.any():
            return NOTHING_READ
        states, outcomes = states[reads], outcomes[reads]
        key = (states.tobytes(), outcomes.tobytes())
        number = self.number.get(key)
        if number is None:
            number = self.number[key] = self.count
            self.count += 1
            if self.count > self.most:
                raise ConstraintError(
                    f"the constraint is too large: more than {self.limits.cells} pairs of a state "
                    "and a kind of token"
                )
            if self.count > len(self.read):
                rows = min(2 * len(self.read), self.most)
                larger: np.ndarray = np.zeros((rows, self.read.shape[1]), dtype=np.int32)
                larger[: len(self.read)] = self.read
                self.read = larger
            if self.count > len(self.composed):
                more = ((0, len(self.composed)), (0, 0))
                self.composed = np.pad(self.composed, more, constant_values=UNKNOWN)
            self.read[number, states] = outcomes
        return number

    def _leave(self, first: int) -> None:
        """Let functions from `first` on leave rules: a caller may read the whole text."""
        read = self.read[first : self.count]
        number, place = np.nonzero(self.followers.read(read != NO_WAY))
        states = self.followers.leaving[place]
        inner = read[number, states].tolist()
        read[number, states] = [
            self.outcomes.number([*self.outcomes.alternatives[outcome], ((function,), LEFT)])
            for function, outcome in zip((first + number).tolist(), inner, strict=True)
        ]

    def _after_call(self, move: int, function: int) -> int:
        """The outcome of a byte's outcome, followed by a function."""
        key = (move, function)
        if key not in self.through:
            found: set[Alternative] = set()
            for pushed, state in self.outcomes.alternatives[move]:
                self._return(pushed, int(self.read[function, state]), found)
            self.through[key] = self.outcomes.number(found)
        return self.through[key]

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
    """What a byte does, by the states that read it.

    Attributes:
        states: int64 ``[n]``, those states, ascending.
        targets: int64 ``[n]``, the states after the byte; any state where a rule is called.
        calls: places in `states` where the byte does more than lead to a state, and its outcomes.
    """

    states: np.ndarray
    targets: np.ndarray
    calls: list[tuple[int, int]]

    @classmethod
    def of(cls, outcome: np.ndarray, states: int) -> _Step:
        """From the outcome of the byte in every state, int ``[states]``."""
        reads = np.flatnonzero(outcome != NO_WAY)
        some = outcome[reads]
        plain = some <= states
        calls = [(place, int(some[place])) for place in np.flatnonzero(~plain).tolist()]
        return cls(reads, np.where(plain, some - 1, 0), calls)
