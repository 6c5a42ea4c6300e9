"""Stacks of states to return to, each with a number of its own."""

from __future__ import annotations

from canvas_grammar.automaton.distance import NEVER
from canvas_grammar.automaton.pushdown import PushdownTables

EMPTY_STACK = 0


class Stacks:
    """The stacks that have been met, by number. Equal stacks have the same number.

    Attributes:
        below: the stack without its top.
        back: the rule state to which the top returns.
        height: how many states the stack holds.
        rest: tokens that are enough to end all its rules.
        may_end: whether a text may end there.
        content: a digest of its states, which does not depend on what has been met before.
    """

    def __init__(self, tables: PushdownTables) -> None:
        self._tokens = tables.tokens.tolist()
        self._may_leave = tables.may_leave.tolist()
        self.below, self.back, self.height, self.rest = [0], [0], [0], [0]
        self.may_end = [True]
        self.content = [0]
        self._number: dict[tuple[int, int], int] = {}

    def push(self, stack: int, back: int) -> int:
        """The stack with another state on top."""
        key = (stack, back)
        number = self._number.get(key)
        if number is None:
            number = self._number[key] = len(self.below)
            self.below.append(stack)
            self.back.append(back)
            self.height.append(self.height[stack] + 1)
            self.rest.append(min(self.rest[stack] + self._tokens[back], NEVER))
            self.may_end.append(self.may_end[stack] and bool(self._may_leave[back]))
            self.content.append(hash((self.content[stack], back)))
        return number
