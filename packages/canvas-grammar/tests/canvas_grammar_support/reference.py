"""The paths of a step in plain loops: what the other forms are compared with.

One canvas at a time, see `best_path` for what is computed.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from canvas_grammar.decoding.best_path import (
    FIRST_CHUNK_INDEX,
    FIRST_CLASS_INDEX,
    FIRST_EDGE_INDEX,
    FIRST_MEMBER_INDEX,
    FIRST_RANGE_INDEX,
    FLOOR,
    LOG2_E,
    CanvasWindow,
    ConstrainedPath,
    FreeTokens,
)
from canvas_grammar.decoding.tables import Column, Tables
from canvas_grammar.decoding.token_classes import CHUNK

from canvas_grammar_support.noise import gumbel


def find_path(
    automaton: Tables,
    classes: Tables,
    logits: torch.Tensor,
    exact: torch.Tensor,
    window: CanvasWindow,
    free: FreeTokens,
    path: ConstrainedPath,
    draws: bool,
) -> float:
    """Write the best path, or a drawn one, of the only canvas of `path`.

    Args:
        automaton: of the canvas, on the host, like everything else.
        classes: of the canvas.
        logits: ``[L, ids]``.
        exact: the logits by which tokens are compared with the likeliest, ``[L, ids]``; usually
            the same.
        window: of the canvas, with a leading dimension of 1, like the rest.
        free: what the canvas would hold otherwise.
        path: where the path is written.
        draws: whether it is drawn.

    Returns:
        The weight of the path, or the logarithm of the summed exponentials of the weights of all.
    """
    return _Search(automaton, classes, logits, exact, window, free, draws).write(path)


class _Search:
    def __init__(
        self,
        automaton: Tables,
        classes: Tables,
        logits: torch.Tensor,
        exact: torch.Tensor,
        window: CanvasWindow,
        free: FreeTokens,
        draws: bool,
    ) -> None:
        self.automaton, self.classes, self.free, self.draws = automaton, classes, free, draws
        self.first, self.end = int(window.first[0]), int(window.end[0])
        self.state, self.left = int(window.state[0]), int(window.budget[0]) - self.end + self.first
        self.forced: list[int] = window.forced[0].tolist()
        rows = logits.float()
        self.rows, self.exact = torch.where(rows.isnan(), -math.inf, rows), exact.float()
        if draws and free.temperature is not None and float(free.temperature[0]) > 0:
            self.rows = self.rows / free.temperature[0]
        kind, count = classes[Column.CLASS_OF_TOKEN], classes[Column.IDS]
        self.class_of_token = classes.numbers[kind : kind + count].numpy()
        self.none = classes[Column.CLASSES]
        self.weights: np.ndarray = np.full((len(self.forced), self.none), -np.inf)
        for position in range(self.first, self.end):
            self.weights[position] = self.class_weights(position)

    def _list(self, column: Column, first: Column, of: int) -> list[int]:
        """An adjacent part of a table."""
        begin, end = self.automaton.table(first, of + 2)[of:].tolist()
        return self.automaton.numbers[self.automaton[column] :][begin:end].tolist()

    def members(self, kind: int) -> torch.Tensor:
        """The tokens of a class, ascending."""
        return torch.from_numpy(np.flatnonzero(self.class_of_token == kind))

    def class_of(self, token: int) -> int:
        return int(self.class_of_token[min(token, len(self.class_of_token) - 1)])

    def joined(self, weights: list[float]) -> float:
        """The largest weight, or the logarithm of the sum; to base 2 where drawn."""
        top = max(weights, default=-math.inf)
        if not self.draws or top == -math.inf:
            return top
        return top + math.log2(sum(2.0 ** (weight - top) for weight in weights))

    def class_weights(self, position: int) -> np.ndarray:
        """The weight of each class, float64 ``[C]``; to base 2 where drawn."""
        weights: np.ndarray = np.full(self.none, -np.inf)
        if self.forced[position] >= 0:
            kind = self.class_of(self.forced[position])
            if kind < self.none:
                weights[kind] = 0
            return weights
        for kind in range(self.none):
            logits = self.rows[position, self.members(kind)]
            if len(logits):
                joined = logits.logsumexp(0) if self.draws else logits.max()
                weights[kind] = float(joined)
        return self.limited(weights)

    def limited(self, weights: np.ndarray) -> np.ndarray:
        clamped = np.clip(np.nan_to_num(weights, nan=FLOOR), FLOOR, -FLOOR)
        return clamped * LOG2_E if self.draws else clamped

    def label_weight(self, position: int, label: int) -> float:
        members = self._list(Column.MEMBER, Column.FIRST_MEMBER, label)
        own = self.joined(self.weights[position, members].tolist())
        if label != self.automaton[Column.END_LABEL] or self.forced[position] >= 0:
            return own
        whole = float(self.rows[position, self.free.likeliest[0, position]])
        if self.draws:
            assert self.free.share is not None
            whole -= math.log(float(self.free.share[0, position]))
        return max(own, float(self.limited(np.array(whole))))

    def edges(self, state: int) -> list[tuple[int, int]]:
        """Targets and labels."""
        targets = self._list(Column.TARGET, Column.FIRST_EDGE, state)
        return list(zip(targets, self._list(Column.LABEL, Column.FIRST_EDGE, state), strict=True))

    def write(self, path: ConstrainedPath) -> float:
        states = self.automaton[Column.STATES]
        distance = self.automaton.table(Column.DISTANCE, states).tolist()
        edges = [self.edges(state) for state in range(states)]
        message = [0.0 if near <= self.left else -math.inf for near in distance]
        messages, labels = {self.end: message}, dict[int, list[float]]()
        for position in range(self.end - 1, self.first - 1, -1):
            found = range(self.automaton[Column.LABELS])
            label = labels[position] = [self.label_weight(position, one) for one in found]
            message = messages[position] = [
                self.joined([message[target] + label[name] for target, name in of]) for of in edges
            ]
        state, weight = self.state, message[self.state]
        path.feasible[0] = feasible = weight > -math.inf
        path.states[0] = state
        for position in range(len(self.forced)):
            inside = self.first <= position < self.end
            path.inside[0, position] = inside
            path.after_end[0, position] = inside and distance[state] == 0
            token = self.outside(position)
            if inside and feasible:
                scores = [
                    messages[position + 1][target] + labels[position][name]
                    for target, name in edges[state]
                ]
                pick = self.pick(position, scores, FIRST_EDGE_INDEX, LOG2_E)
                state, label_of_path = edges[state][pick]
                if self.forced[position] < 0:
                    token = self.token(position, label_of_path)
            path.token[0, position] = token
            path.states[0, position + 1] = state
            near = min(token, len(self.class_of_token) - 1)
            likeliest = int(self.free.likeliest[0, position])
            path.margin[0, position] = self.exact[position, near] - self.exact[position, likeliest]
        return weight / LOG2_E if self.draws else weight

    def outside(self, position: int) -> int:
        forced = position < self.end and self.forced[position] >= 0
        return self.forced[position] if forced else self.classes[Column.END_TOKEN]

    def token(self, position: int, label: int) -> int:
        """A token of a label at a free position."""
        members = self._list(Column.MEMBER, Column.FIRST_MEMBER, label)
        scores = self.weights[position, members].tolist()
        if self.draws:
            noise = self.noise(position, FIRST_CLASS_INDEX, members).tolist()
            scores = [score + LOG2_E * luck for score, luck in zip(scores, noise, strict=True)]
        kind = members[int(np.argmax(scores))]
        free = self.free.drawn if self.draws else self.free.likeliest
        assert free is not None
        if self.class_of(int(free[0, position])) == kind:
            return int(free[0, position])
        tokens = self.members(kind)
        logits = self.rows[position, tokens]
        if not self.draws:
            return int(tokens[logits.argmax()])
        chunks = [
            float(each.logsumexp(0).nan_to_num(-math.inf, math.inf, -math.inf))
            for each in logits.split(CHUNK)
        ]
        ranges = [
            float(torch.tensor(chunks[first : first + CHUNK]).logsumexp(0))
            for first in range(0, len(chunks), CHUNK)
        ]
        first = self.pick(position, ranges, FIRST_RANGE_INDEX) * CHUNK
        within = chunks[first : first + CHUNK]
        chunk = first + self.pick(position, within, FIRST_CHUNK_INDEX + first)
        tokens, logits = tokens.split(CHUNK)[chunk], logits.split(CHUNK)[chunk]
        if logits.max() == -math.inf:  # all are equally likely
            logits = torch.zeros_like(logits)
        score = logits + self.noise(position, FIRST_MEMBER_INDEX, tokens.tolist())
        return int(tokens[score.argmax()])

    def pick(self, position: int, scores: list[float], index: int, scale: float = 1.0) -> int:
        """The first of the largest scores, with noise where the path is drawn."""
        array = np.array(scores)
        if self.draws:
            array = array + scale * self.noise(position, index, list(range(len(scores)))).numpy()
        return int(array.argmax())

    def noise(self, position: int, index: int, offsets: list[int]) -> torch.Tensor:
        """Float32 ``[offsets]``."""
        assert self.free.keys is not None
        return gumbel(self.free.keys[:, position], index + torch.tensor(offsets))[0]
