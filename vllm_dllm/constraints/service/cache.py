"""A cache of verdicts on constraints: the automaton, or the reason why there is none."""

from __future__ import annotations

from collections import OrderedDict

from vllm_dllm.constraints.automaton.compiled import CompiledConstraint
from vllm_dllm.constraints.limits import ConstraintError

# An automaton takes from a hundred kilobytes to some megabytes.
MOST_BYTES = 256 << 20
MOST_REFUSALS = 2048


class CompiledConstraints:
    """The automata and refusals that were used last. Not thread-safe.

    Automata and refusals are evicted separately, so that many refused constraints never evict
    somebody's automaton.
    """

    def __init__(self, most_bytes: int = MOST_BYTES, most_refusals: int = MOST_REFUSALS) -> None:
        self._most_bytes, self._most_refusals = most_bytes, most_refusals
        self._automata: OrderedDict[bytes, CompiledConstraint] = OrderedDict()
        self._refusals: OrderedDict[bytes, str] = OrderedDict()
        self._bytes = 0

    def get(self, key: bytes) -> CompiledConstraint | ConstraintError | None:
        """The verdict on a constraint, or None where there is none yet."""
        if key in self._automata:
            self._automata.move_to_end(key)
            return self._automata[key]
        if key in self._refusals:
            self._refusals.move_to_end(key)
            return ConstraintError(self._refusals[key])
        return None

    def put(self, key: bytes, verdict: CompiledConstraint | ConstraintError) -> None:
        """Add a verdict; the least recently used ones are evicted to make room."""
        if isinstance(verdict, ConstraintError):
            self._refusals[key] = str(verdict)
            while len(self._refusals) > self._most_refusals:
                self._refusals.popitem(last=False)
            return
        if key not in self._automata:
            self._bytes += len(verdict.packed)
        self._automata[key] = verdict
        while self._bytes > self._most_bytes and len(self._automata) > 1:
            self._bytes -= len(self._automata.popitem(last=False)[1].packed)
