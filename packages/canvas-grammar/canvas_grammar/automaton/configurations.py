"""The states of a constraint between tokens, found as far as they are needed.

A configuration is a rule state and a stack of states to return to. A state is a set of
configurations, because a text may be read in several ways; so every text leads to one state, and
its probability is counted once. If a text can be read in very many ways, those that can end soonest
are followed, and texts that only the others allow are not offered. States and stacks are numbered
as they are first met.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from canvas_grammar.automaton.byte_moves import LEFT, NO_WAY
from canvas_grammar.automaton.graph import NEVER
from canvas_grammar.automaton.pushdown import NO_CLASS, PushdownTables
from canvas_grammar.limits import ConstraintError, spend

EMPTY_STACK = 0


class Stacks:
    """The stacks of states to return to that have been met, by number; equal ones have the same.

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
        number = self._number.setdefault((stack, back), len(self.below))
        if number == len(self.below):
            self.below.append(stack)
            self.back.append(back)
            self.height.append(self.height[stack] + 1)
            self.rest.append(min(self.rest[stack] + self._tokens[back], NEVER))
            self.may_end.append(self.may_end[stack] and bool(self._may_leave[back]))
            self.content.append(hash((self.content[stack], back)))
        return number


# Numbers of states.
START, END_OF_TEXT = 0, 1
NO_STATE = -1
OBJECT_BYTES = 500  # of a state, a stack or a label, beside its arrays
# How many ways to read the same text are followed; a grammar may add more with every character.
MOST_READINGS = 8

Configuration = tuple[int, int]  # a stack, a rule state


class Moves(NamedTuple):
    """Where tokens lead from a state: int32 ``[moves]``."""

    targets: np.ndarray  # states, each once
    labels: np.ndarray  # numbers of sets of classes


class Configurations:
    """The states of one constraint that have been met. Not thread-safe.

    Attributes:
        tables: the constraint.
        depth: the most states that a stack may hold.
        stacks: the stacks of the states that have been met.
    """

    def __init__(self, tables: PushdownTables, depth: int) -> None:
        """Begin with only the start state met; texts that all nest deeper are refused."""
        self.tables, self.depth = tables, depth
        self.stacks = Stacks(tables)
        self._alternatives = tables.alternatives
        # The suffix with which an outcome leaves a rule, for outcomes that only do that.
        self._suffix_left = np.array(
            [some[0][0][0] if len(some) == 1 and some[0][1] == LEFT else -1
             for some in self._alternatives]
        )  # fmt: skip
        self._tokens, self._calls = tables.tokens.tolist(), tables.calls.tolist()
        self._may_leave = tables.may_leave.tolist()
        self._must_leave = tables.must_leave.tolist()
        self.members: list[tuple[Configuration, ...]] = []
        self.distance: list[int] = []
        self._state_number: dict[tuple[Configuration, ...], int] = {}
        self._moves: dict[int, Moves] = {}
        self._groups: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._left: dict[int, np.ndarray] = {}
        self._partitions: dict[bytes, np.ndarray] = {}
        self.labels: list[np.ndarray] = []
        self._label_number: dict[bytes, int] = {}
        self.end_label = self._label(np.array([tables.classes - 1], dtype=np.int32))
        start = int(tables.start[0])
        if self._calls[start] > depth:
            raise ConstraintError(
                f"every output of the constraint nests deeper than {depth} calls of its rules "
                "(diffusion_constraint_depth)"
            )
        self._state({(EMPTY_STACK, start)})
        self.members.append(())
        self.distance.append(0)
        self._moves[END_OF_TEXT] = Moves(
            np.array([END_OF_TEXT], dtype=np.int32), np.array([self.end_label], dtype=np.int32)
        )

    @property
    def nbytes(self) -> int:
        """About how many bytes the constraint takes, with what has been met."""
        parts = *self._moves.values(), *self._groups.values()
        arrays = [*vars(self.tables).values(), *(array for part in parts for array in part)]
        arrays += [*self.labels, *self._left.values(), *self._partitions.values()]
        objects = len(self.members) + len(self.stacks.below) + len(self.labels)
        of_arrays = sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))
        return of_arrays + OBJECT_BYTES * (objects + len(self._alternatives))

    def snapshot(self) -> dict[str, np.ndarray]:
        """Everything met so far, for `restore`; int32 arrays by name."""
        known = sorted(self._moves)
        moves = [self._moves[state] for state in known]
        flat = [pair for some in self.members for pair in some]
        parts = {
            "stacks": [self.stacks.below, self.stacks.back],
            "member_count": [len(some) for some in self.members],
            "member": flat,
            "known": known,
            "move_count": [len(some.targets) for some in moves],
            "move": [np.concatenate(part) for part in zip(*moves, strict=True)],
            "label_count": [len(classes) for classes in self.labels],
            "label": np.concatenate(self.labels),
        }
        return {name: np.asarray(part, dtype=np.int32) for name, part in parts.items()}

    def restore(self, stored: dict[str, np.ndarray]) -> None:
        """Add what another object for the same constraint had met when `stored` was taken."""
        for below, back in stored["stacks"].T[1:].tolist():
            self.stacks.push(below, back)
        bounds = np.cumsum(stored["member_count"])[:-1]
        for number, some in enumerate(np.split(stored["member"].reshape(-1, 2), bounds)):
            if number > END_OF_TEXT:
                self._state({(stack, state) for stack, state in some.tolist()})
        for classes in np.split(stored["label"], np.cumsum(stored["label_count"])[:-1]):
            self._label(classes)
        parts = np.split(stored["move"], np.cumsum(stored["move_count"])[:-1], axis=1)
        for state, (targets, labels) in zip(stored["known"].tolist(), parts, strict=True):
            self._moves[state] = Moves(targets, labels)

    def after(self, state: int, token: int) -> int:
        """The state after a token, or `NO_STATE`."""
        kind = int(self.tables.class_of_token[token])
        if kind == NO_CLASS or state == NO_STATE:
            return NO_STATE
        if kind == self.tables.classes - 1:
            return END_OF_TEXT if state == END_OF_TEXT or self._may_end_in(state) else NO_STATE
        found: set[Configuration] = set()
        for stack, rule_state in self.members[state]:
            self._follow(stack, int(self.tables.outcomes(rule_state)[kind]), found)
        return self._state(found) if found else NO_STATE

    def stack_of(self, state: int) -> int:
        """The highest stack of a state's configurations."""
        return max((stack for stack, _ in self.members[state]), key=self.stacks.height.__getitem__,
                   default=EMPTY_STACK)  # fmt: skip

    def moves(self, state: int) -> Moves:
        """Where tokens lead from a state."""
        if state not in self._moves:
            self._moves[state] = self._find_moves(state)
        return self._moves[state]

    def _find_moves(self, state: int) -> Moves:
        configurations = self.members[state]
        spend(50 + len(configurations) * (50 + self.tables.classes // 16))
        results = [self._results(stack, rule_state) for stack, rule_state in configurations]
        target_of_class = results[0] if len(results) == 1 else self._joined(results)
        targets, first, kind = np.unique(target_of_class, return_index=True, return_inverse=True)
        # By the lowest class, because numbers of states depend on what has been met before.
        order = np.argsort(first)
        place: np.ndarray = np.empty_like(order)
        place[order] = np.arange(len(order))
        targets, kind_of_class = targets[order], place[kind.reshape(-1)]
        key = kind_of_class.astype(np.int16).tobytes()
        labels = self._partitions.get(key)
        if labels is None:
            order = np.argsort(kind_of_class, kind="stable").astype(np.int32)
            last = np.cumsum(np.bincount(kind_of_class, minlength=len(targets)))
            numbers = [self._label(classes) for classes in np.split(order, last[:-1])]
            labels = self._partitions[key] = np.array(numbers, dtype=np.int32)
        alive = targets != NO_STATE
        targets, labels = targets[alive].astype(np.int32), labels[alive]
        if self._may_end_in(state):
            targets = np.append(targets, np.int32(END_OF_TEXT))
            labels = np.append(labels, np.int32(self.end_label))
        return Moves(targets, labels)

    def _results(self, stack: int, rule_state: int) -> np.ndarray:
        """The state after a token of each class but the last, int64 ``[classes - 1]``."""
        groups = self._groups.get(rule_state)
        if groups is None:
            found = np.unique(self.tables.outcomes(rule_state), return_inverse=True)
            groups = self._groups[rule_state] = found[0], found[1].reshape(-1)
        outcomes, kind_of_class = groups
        return self._resolved(stack, outcomes)[kind_of_class]

    def _resolved(self, stack: int, outcomes: np.ndarray) -> np.ndarray:
        """The states that outcomes lead to from a stack, int64 ``[outcomes]``."""
        suffix = self._suffix_left[outcomes]
        found: np.ndarray = np.full(len(outcomes), NO_STATE, dtype=np.int64)
        leaves = suffix >= 0
        if stack != EMPTY_STACK and leaves.any():
            found[leaves] = self._after_leaving(stack)[suffix[leaves]]
        for place in np.flatnonzero(~leaves & (outcomes != NO_WAY)).tolist():
            some: set[Configuration] = set()
            self._follow(stack, int(outcomes[place]), some)
            if some:
                found[place] = self._state(some)
        return found

    def _after_leaving(self, stack: int) -> np.ndarray:
        """The state after each suffix is read below the top of a stack, int64 ``[suffixes]``."""
        known = self._left.get(stack)
        if known is None:
            column = self.tables.suffix_outcomes(self.stacks.back[stack])
            outcomes, kind = np.unique(column, return_inverse=True)
            known = self._resolved(self.stacks.below[stack], outcomes)[kind.reshape(-1)]
            self._left[stack] = known
        return known

    def _joined(self, results: list[np.ndarray]) -> np.ndarray:
        """The states of each class that hold what several states hold; int64 ``[classes - 1]``."""
        key = results[0]
        for more in results[1:]:
            # From `NO_STATE` on, so that no two pairs have the same number.
            pair = key * (len(self.members) - NO_STATE) + (more - NO_STATE)
            _, key = np.unique(pair, return_inverse=True)
        _, first, kind = np.unique(key, return_index=True, return_inverse=True)
        joined = []
        for place in first.tolist():
            some = {pair for each in results if each[place] != NO_STATE
                    for pair in self.members[each[place]]}  # fmt: skip
            joined.append(self._state(some) if some else NO_STATE)
        return np.array(joined, dtype=np.int64)[kind.reshape(-1)]

    def _follow(self, stack: int, outcome: int, found: set[Configuration]) -> None:
        """Add the configurations that an outcome leads to from a stack."""
        for pushed, state in self._alternatives[outcome]:
            if state == LEFT:
                if stack != EMPTY_STACK:
                    below = int(self._after_leaving(stack)[pushed[0]])
                    found.update(self.members[below] if below != NO_STATE else ())
                continue
            top = stack
            for back in pushed:
                if self.stacks.height[top] + self._calls[back] > self.depth:
                    break
                top = self.stacks.push(top, back)
            else:
                while top and self._must_leave[state]:
                    top, state = self.stacks.below[top], self.stacks.back[top]
                if (
                    self.stacks.height[top] + self._calls[state] <= self.depth
                    and self._tokens[state] + self.stacks.rest[top] < NEVER
                ):
                    found.add((top, state))

    def _state(self, found: set[Configuration]) -> int:
        if len(found) > MOST_READINGS:
            found = set(sorted(found, key=self._order)[:MOST_READINGS])
        configurations = tuple(sorted(found))
        number = self._state_number.setdefault(configurations, len(self.members))
        if number == len(self.members):
            self.members.append(configurations)
            self.distance.append(
                1 + min(self._tokens[s] + self.stacks.rest[stack] for stack, s in configurations)
            )
        return number

    def _order(self, configuration: Configuration) -> tuple[int, int, int]:
        """A sort key by how soon a text can end, independent of what was met before."""
        stack, state = configuration
        return self._tokens[state] + self.stacks.rest[stack], state, self.stacks.content[stack]

    def _may_end_in(self, state: int) -> bool:
        return any(
            self._may_leave[s] and self.stacks.may_end[stack] for stack, s in self.members[state]
        )

    def _label(self, classes: np.ndarray) -> int:
        number = self._label_number.setdefault(classes.tobytes(), len(self.labels))
        if number == len(self.labels):
            self.labels.append(classes)
        return number
