"""The automaton that a canvas must follow: it reads classes of tokens.

Its states are those between tokens. Its transitions are edges for dynamic programming: a pair of
states, and a label that stands for the set of classes that lead from one to the other. Equal sets
share one label.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from canvas_grammar.automaton.distance import DEAD
from canvas_grammar.automaton.pushdown import NO_CLASS


@dataclass(frozen=True)
class TokenAutomaton:
    """The states of a constraint that a canvas may visit. It starts in state 0. Arrays are int32.

    The last state is the end of the text, and the last class holds the tokens that end a text. In
    the end state only that class is allowed, and it leads back to the end state. From every state
    a text can end, though not always within these states.

    Attributes:
        class_of_token: ``[ids]``, or `NO_CLASS` for tokens that are never allowed.
        distance: ``[states]``, tokens that are enough to reach the end. The token that ends the
            text counts, so it is 1 where a text may end, and 0 in the end state.
        edge_source, edge_target, edge_label: ``[edges]``, ascending by source, then by target.
        members: the classes of all labels, one label after the other, each ascending.
        label_first: ``[labels + 1]``, where a label's classes begin in `members`.
        classes: number of classes, including the one that ends a text.
    """

    class_of_token: np.ndarray
    distance: np.ndarray
    edge_source: np.ndarray
    edge_target: np.ndarray
    edge_label: np.ndarray
    members: np.ndarray
    label_first: np.ndarray
    classes: int

    @property
    def states(self) -> int:
        """Number of states, including the end."""
        return len(self.distance)

    def after(self, state: int, token: int) -> int:
        """The state after a token, or `DEAD` if it is not among these states."""
        kind = int(self.class_of_token[token])
        if kind == NO_CLASS or state == DEAD:
            return DEAD
        for edge in np.flatnonzero(self.edge_source == state).tolist():
            label = int(self.edge_label[edge])
            if kind in self.members[self.label_first[label] : self.label_first[label + 1]]:
                return int(self.edge_target[edge])
        return DEAD

    def advance(self, state: int, tokens: np.ndarray) -> int:
        """The state after some tokens, int ``[tokens]``, or `DEAD`."""
        for token in np.asarray(tokens).tolist():
            state = self.after(state, token)
        return state
