"""What reading a text may do to a stack of rules: stay in a rule, call others, or leave it.

An *outcome* is a set of *alternatives*; it has more than one where the text can be read in several
ways. An alternative is a pair of a tuple and a state:

- ``(pushed, state)``: the reader is in `state`, and returns to the states `pushed`, last one first,
  before it goes on in the rule in which it began;
- ``((suffix,), LEFT)``: the rule in which it began has ended, and a suffix of the text is still to
  be read by whoever called the rule. The suffix is given by the number of its function.

Outcomes are numbered. 0 has no alternatives, and ``1 + state`` is staying in the rule in a state.
"""

from __future__ import annotations

from collections.abc import Iterable

Alternative = tuple[tuple[int, ...], int]

NO_WAY = 0
LEFT = -1


class Outcomes:
    """Numbers of outcomes over a number of states."""

    def __init__(self, states: int) -> None:
        self.states = states
        self.alternatives: list[tuple[Alternative, ...]] = [
            (),
            *((((), state),) for state in range(states)),
        ]
        self._numbers: dict[frozenset[Alternative], int] = {frozenset(): NO_WAY}

    def number(self, alternatives: Iterable[Alternative]) -> int:
        """The number of a set of alternatives."""
        some = frozenset(alternatives)
        if len(some) == 1:
            (only,) = some
            if not only[0] and only[1] != LEFT:
                return 1 + only[1]
        number = self._numbers.get(some)
        if number is None:
            number = self._numbers[some] = len(self.alternatives)
            self.alternatives.append(tuple(sorted(some)))
        return number
