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

import numpy as np

from vllm_dllm.constraints.automaton.byte_moves import ByteMoves
from vllm_dllm.constraints.automaton.outcomes import LEFT, NO_WAY, Alternative, Outcomes
from vllm_dllm.constraints.automaton.vocabulary import Vocabulary
from vllm_dllm.constraints.limits import CompileLimits, ConstraintError

UNKNOWN = -1
# No text can be read in any state, the empty text can in all.
NOTHING_READ, EMPTY_TEXT = 0, 1
# Table entries that are composed at once: functions times states.
TILE = 1 << 22


class TokenFunctions:
    """The functions of all suffixes of the tokens of a vocabulary.

    Attributes:
        outcomes: the numbers of outcomes.
        of_token: int64 ``[ids]``, the function of each token; `NOTHING_READ` for one without bytes.
    """

    def __init__(
        self, moves: ByteMoves, outcomes: Outcomes, vocabulary: Vocabulary, limits: CompileLimits
    ) -> None:
        """Find all functions.

        Raises:
            ConstraintError: more than ``limits.cells`` pairs of a state and a function.
        """
        self.moves, self.outcomes, self.limits = moves, outcomes, limits
        states, width = moves.outcome.shape
        # In `read`, leaving with the whole text is leaving with the suffix of this number.
        dead: np.ndarray = np.zeros(states, dtype=np.int32)
        stay: np.ndarray = np.arange(1, states + 1, dtype=np.int32)
        self.rows, self.read = [dead, stay], [dead, stay]
        self.number = {row.tobytes(): n for n, row in enumerate(self.rows)}
        self.composed: np.ndarray = np.full((64, width), UNKNOWN, dtype=np.int32)
        self.composed[NOTHING_READ] = NOTHING_READ
        columns = moves.outcome.T
        self.plain = np.where(columns <= states, columns, 0)
        self.calling = [np.flatnonzero(column > states).tolist() for column in columns]
        self.through: dict[tuple[int, int], int] = {}
        self.leaving = np.flatnonzero(moves.may_leave)
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
            width = self.composed.shape[1]
            pairs = np.unique(function[missing].astype(np.int64) * width + column[missing])
            step = max(1, TILE // len(self.rows[0]))
            for first in range(0, len(pairs), step):
                self._compose(*np.divmod(pairs[first : first + step], width))
            numbers = self.composed[function, column]
        return numbers

    def _compose(self, function: np.ndarray, column: np.ndarray) -> None:
        inner = np.stack([self.read[n] for n in function.tolist()])
        inner = np.pad(inner, ((0, 0), (1, 0)))  # what follows a dead byte is dead
        composed = np.take_along_axis(inner, self.plain[column], axis=1)  # [n, states]
        for row, behind, first in zip(composed, function.tolist(), column.tolist(), strict=True):
            for state in self.calling[first]:
                row[state] = self._after_call(int(self.moves.outcome[state, first]), behind)
            self.composed[behind, first] = self._number(row)
        if len(self.rows) * len(self.rows[0]) > self.limits.cells:
            raise ConstraintError(
                f"the constraint is too large: more than {self.limits.cells} pairs of a state and "
                "a kind of token"
            )

    def _number(self, row: np.ndarray) -> int:
        """The number of a function, given without leaving before anything is read."""
        if not row.any():
            return NOTHING_READ
        left = row[self.leaving]
        for outcome in np.unique(left).tolist():
            left[left == outcome] = -self.outcomes.with_unread(outcome)
        row[self.leaving] = -left
        key = row.tobytes()
        number = self.number.get(key)
        if number is None:
            number = self.number[key] = len(self.rows)
            self.rows.append(row.copy())
            self.read.append(self._with_suffix(row, number))
            if len(self.rows) > len(self.composed):
                more = ((0, len(self.composed)), (0, 0))
                self.composed = np.pad(self.composed, more, constant_values=UNKNOWN)
        return number

    def _with_suffix(self, row: np.ndarray, number: int) -> np.ndarray:
        """A function in which leaving with the whole text is leaving with suffix `number`."""
        read, leaving = row.copy(), row[self.leaving]
        for outcome in np.unique(leaving).tolist():
            named = [
                ((number,), LEFT) if (pushed, state) == ((), LEFT) else (pushed, state)
                for pushed, state in self.outcomes.alternatives[outcome]
            ]
            read[self.leaving[leaving == outcome]] = self.outcomes.number(named)
        return read

    def _after_call(self, move: int, function: int) -> int:
        """The outcome of a byte's outcome, followed by a function."""
        key = (move, function)
        if key not in self.through:
            found: set[Alternative] = set()
            for pushed, state in self.outcomes.alternatives[move]:
                self._return(pushed, int(self.read[function][state]), found)
            self.through[key] = self.outcomes.number(found)
        return self.through[key]

    def _return(self, pushed: tuple[int, ...], outcome: int, found: set[Alternative]) -> None:
        """Add the alternatives of an outcome above a stack; those that leave read on below."""
        if outcome == NO_WAY:
            return
        for more, state in self.outcomes.alternatives[outcome]:
            if state == LEFT:
                if pushed:
                    self._return(pushed[:-1], int(self.read[more[0]][pushed[-1]]), found)
                else:
                    found.add((more, LEFT))
                continue
            stack = (*pushed, *more)
            while stack and self.moves.must_leave[state]:
                *below, state = stack
                stack = tuple(below)
            found.add((stack, state))
