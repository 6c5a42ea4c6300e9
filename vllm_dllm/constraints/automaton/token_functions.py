"""From bytes to tokens: which tokens act alike in every state, and where they lead.

Each token is a function from states to states, the composition of the functions of its bytes. All
tokens are followed together, one byte per round. Equal functions are recognized by their whole
contents, so tokens with the same function do act alike, and each function is composed with each
byte only once. A vocabulary of 150,000 tokens has a few hundred different functions.
"""

from __future__ import annotations

import numpy as np

from vllm_dllm.constraints.automaton.byte_automaton import ByteAutomaton
from vllm_dllm.constraints.automaton.distance import DEAD
from vllm_dllm.constraints.automaton.equal_rows import equal_rows
from vllm_dllm.constraints.automaton.vocabulary import Vocabulary
from vllm_dllm.constraints.limits import CompileLimits, ConstraintError

UNKNOWN = -1
# Table entries that are composed at once: functions times states.
TILE = 1 << 22


def token_functions(
    automaton: ByteAutomaton, vocabulary: Vocabulary, limits: CompileLimits
) -> tuple[np.ndarray, np.ndarray]:
    """The state that each token leads to from each state.

    Returns:
        int32 ``[ids]``, the function of each token id, and int32 ``[functions, states]``, the state
        that a function leads to, or `DEAD`. Function 0 leads nowhere; tokens without bytes have it.

    Raises:
        ConstraintError: more than ``limits.cells`` entries.
    """
    first, column_of_byte = equal_rows(np.ascontiguousarray(automaton.next.T))
    functions = _Functions(automaton.next[:, first], limits)
    lengths = np.diff(vocabulary.offsets)
    # Sorted by length, longest first: the tokens with further bytes are then always a prefix.
    order = np.argsort(-lengths, kind="stable")
    begin = vocabulary.offsets[:-1][order]
    # How many tokens are longer than 0, 1, 2 ... bytes.
    rounds = np.arange(lengths.max(initial=0))
    going = np.asarray(np.searchsorted(-lengths[order], -rounds, side="left"))
    current: np.ndarray = np.full(len(lengths), functions.identity)
    for index, count in enumerate(going.tolist()):
        byte = vocabulary.data[begin[:count] + index]
        current[:count] = functions.followed_by(current[:count], column_of_byte[byte])
    current[lengths[order] == 0] = 0
    function_of_token: np.ndarray = np.empty(len(lengths), dtype=np.int32)
    function_of_token[order] = current
    return function_of_token, functions.table()


class _Functions:
    """Distinct functions from states to states. Internally the dead state is `states`."""

    identity = 1

    def __init__(self, columns: np.ndarray, limits: CompileLimits) -> None:
        states, width = columns.shape
        self.limits = limits
        self.type = np.int16 if states < 1 << 15 else np.int32
        moves: np.ndarray = np.full((width, states + 1), states, dtype=self.type)
        moves[:, :states] = np.where(columns == DEAD, states, columns).T
        self.moves = moves
        self.rows = [
            np.full(states + 1, states, dtype=self.type),
            np.arange(states + 1, dtype=self.type),
        ]
        self.number = {row.tobytes(): n for n, row in enumerate(self.rows)}
        self.composed: np.ndarray = np.full((64, width), UNKNOWN, dtype=np.int32)
        self.composed[0] = 0

    def followed_by(self, function: np.ndarray, column: np.ndarray) -> np.ndarray:
        """Each function, int ``[n]``, followed by a byte, given by its column, int ``[n]``."""
        numbers = self.composed[function, column]
        missing = numbers == UNKNOWN
        if missing.any():
            width = self.composed.shape[1]
            pairs = np.unique(function[missing].astype(np.int64) * width + column[missing])
            step = max(1, TILE // self.moves.shape[1])
            for first in range(0, len(pairs), step):
                self._compose(*np.divmod(pairs[first : first + step], width))
            numbers = self.composed[function, column]
        return numbers

    def _compose(self, function: np.ndarray, column: np.ndarray) -> None:
        inner = np.stack([self.rows[n] for n in function.tolist()])
        composed = self.moves[column[:, None], inner]  # [n, states + 1]
        numbers = []
        for row in composed:
            key = row.tobytes()
            number = self.number.get(key)
            if number is None:
                number = self.number[key] = len(self.rows)
                self.rows.append(row.copy())
            numbers.append(number)
        if len(self.rows) * len(self.rows[0]) > self.limits.cells:
            raise ConstraintError(
                f"the constraint is too large: more than {self.limits.cells} pairs of a state and "
                "a kind of token"
            )
        if len(self.rows) > len(self.composed):
            missing_rows = max(2 * len(self.composed), len(self.rows)) - len(self.composed)
            self.composed = np.pad(
                self.composed, ((0, missing_rows), (0, 0)), constant_values=UNKNOWN
            )
        self.composed[function, column] = numbers

    def table(self) -> np.ndarray:
        """All functions, int32 ``[functions, states]``, with `DEAD` for the dead state."""
        whole = np.stack(self.rows)[:, :-1].astype(np.int32)
        return np.where(whole == self.moves.shape[1] - 1, DEAD, whole)
