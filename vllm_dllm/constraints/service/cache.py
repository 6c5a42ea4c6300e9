"""What is known of constraints: their automata, and why there is none."""

from __future__ import annotations

from collections import OrderedDict

from vllm_dllm.constraints.automaton.token_automaton import TokenAutomaton
from vllm_dllm.constraints.limits import ConstraintError

# Automata take a hundred kilobytes to some megabytes each.
MOST_BYTES = 256 << 20
MOST_REFUSALS = 2048


class Kept:
    """The latest automata and refusals. Not for several threads at once.

    They are kept apart: many constraints that are refused cost nobody the automaton of another.
    """

    def __init__(self, most_bytes: int = MOST_BYTES, most_refusals: int = MOST_REFUSALS) -> None:
        self._most_bytes, self._most_refusals = most_bytes, most_refusals
        self._automata: OrderedDict[bytes, TokenAutomaton] = OrderedDict()
        self._refusals: OrderedDict[bytes, str] = OrderedDict()
        self._bytes = 0

    def get(self, key: bytes) -> TokenAutomaton | ConstraintError | None:
        """What was found for a constraint, or None."""
        if key in self._automata:
            self._automata.move_to_end(key)
            return self._automata[key]
        if key in self._refusals:
            self._refusals.move_to_end(key)
            return ConstraintError(self._refusals[key])
        return None

    def put(self, key: bytes, found: TokenAutomaton | ConstraintError) -> None:
        """Keep what was found; what has not been asked for longest may have to go."""
        if isinstance(found, ConstraintError):
            self._refusals[key] = str(found)
            while len(self._refusals) > self._most_refusals:
                self._refusals.popitem(last=False)
            return
        if key not in self._automata:
            self._bytes += _size(found)
        self._automata[key] = found
        while self._bytes > self._most_bytes and len(self._automata) > 1:
            self._bytes -= _size(self._automata.popitem(last=False)[1])


def _size(automaton: TokenAutomaton) -> int:
    arrays = sum(array.nbytes for array in vars(automaton).values() if hasattr(array, "nbytes"))
    return arrays + len(automaton.to_bytes())
