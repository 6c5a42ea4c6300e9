"""Find the best path of each canvas through its automaton, or sample one, by dynamic programming.

A canvas of L positions gives each class of tokens a weight at each position. A path is one class
for each position of the canvas' *window*. It starts in a given state and ends in a state from which
the rest of the token budget is enough to finish the text. Its weight is the sum of the weights of
its classes, but forced positions, where all paths have the same class, weigh nothing. What follows
the end of a text is ignored, so each position there weighs as much as all tokens together: the
largest of all weights, or their log-sum-exp. Otherwise a model that writes something other than
end-of-sequence tokens there would be led to texts that do not end.

First, messages are passed from the last position to the first. The message of a state is the
largest weight of any path from that state on (Viterbi), or the logarithm of the sum over all paths.
Then one walk from the first position to the last chooses an edge of the automaton at each position,
greedily or at random, and a class of the edge's label. The result is exact, and the walk never runs
into a dead end.

Weights are added in float64: over 256 positions they add up to thousands, and in float32 close
paths would become ties. Sums of exponentials are computed to base 2, see `log_sums`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

from canvas_grammar.decoding.automaton_batch import AutomatonBatch
from canvas_grammar.decoding.class_tokens import FIRST_RANGE_INDEX
from canvas_grammar.decoding.log_sums import LOG2_E, LOWEST
from canvas_grammar.decoding.noise import gumbel

# The smallest weight. Clamping keeps every class possible that the automaton allows, because the
# output must be valid even if a model rules out all tokens that the constraint allows.
FLOOR = -1e6
# Edges and classes draw their noise from the keys of a position at indices beyond those that token
# ids, groups of ids and ranges of groups use.
FIRST_EDGE_INDEX = FIRST_RANGE_INDEX + (1 << 28)
FIRST_CLASS_INDEX = FIRST_EDGE_INDEX + (1 << 28)
# Reduces rows [rows, ...] to [groups, ...], given each group's size and the group of each row.
SegmentReduce = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class CanvasWindow:
    """The positions of each canvas that must follow the automaton, and the state to start from.

    Attributes:
        state: int64 ``[n]``, the state of the canvas' automaton before the window.
        first: int64 ``[n]``, the window's first position: after the part of the prompt that is in
            the canvas, and after the tokens of the canvas that have been emitted.
        budget: int64 ``[n]``, how many tokens may be emitted from `first` on, including the one
            that ends the text.
        width: int64 ``[n]``, the number of positions of the canvas, at most L.
        forced: int64 ``[n, L]``, tokens that must stay, or -1 where the path is free. Outside the
            window the automaton ignores them.
    """

    state: torch.Tensor
    first: torch.Tensor
    budget: torch.Tensor
    width: torch.Tensor
    forced: torch.Tensor

    @property
    def end(self) -> torch.Tensor:
        """Int64 ``[n]``, the position after the window's last."""
        return torch.minimum(self.first + self.budget, self.width).clamp_min(self.first)

    def inside(self) -> torch.Tensor:
        """Bool ``[n, L]``, which positions are in the window."""
        position = torch.arange(self.forced.shape[1], device=self.forced.device)
        return (position >= self.first[:, None]) & (position < self.end[:, None])

    def wanted(self) -> torch.Tensor:
        """Bool ``[n, L]``, the positions of the window whose token is not forced."""
        return self.inside() & (self.forced < 0)

    def part(self, canvases: slice) -> CanvasWindow:
        """The windows of a slice of the canvases."""
        return CanvasWindow(*(getattr(self, f.name)[canvases] for f in fields(self)))

    def take(self, index: torch.Tensor) -> CanvasWindow:
        """The windows of the canvases at `index`, int64 ``[m]``."""
        return CanvasWindow(*(getattr(self, f.name).index_select(0, index) for f in fields(self)))


@dataclass(frozen=True)
class ClassPaths:
    """A path of token classes through each canvas.

    Attributes:
        classes: int64 ``[n, L]``; C outside the window.
        states: int64 ``[n, L + 1]``, the state before each position, and after the last.
        feasible: bool ``[n]``. Where false, the forced tokens and the budget leave no path, and
            the other attributes are meaningless.
        weight: float64 ``[n]``, the weight of the best path, or the logarithm of the summed
            exponentials of the weights of all paths.
    """

    classes: torch.Tensor
    states: torch.Tensor
    feasible: torch.Tensor
    weight: torch.Tensor


def best_paths(
    batch: AutomatonBatch,
    weights: torch.Tensor,
    window: CanvasWindow,
    kind: torch.Tensor,
    whole: torch.Tensor,
) -> ClassPaths:
    """The path of the largest weight in each canvas (Viterbi).

    Where edges tie, the path takes the one whose label has the lowest class; where classes of a
    label tie, the lowest.

    Args:
        batch: the automata of the ``n`` canvases.
        weights: ``[n, L, C + 1]``, any floating dtype; where a token is forced they are not read.
        window: of the canvases.
        kind: int64 ``[n, L]``, the class of each forced token, C if it has none.
        whole: float32 ``[n, L]``, the largest weight of any token, allowed or not.
    """
    allowed = _allowed_weights(weights, window, kind)
    labels = _label_weights(batch, allowed, _segment_max)
    _weigh_behind_end(batch, labels, window, whole)
    table = _backward_messages(batch, labels, window, _segment_max)
    return _forward_walk(batch, table, allowed, window)


def drawn_paths(
    batch: AutomatonBatch,
    weights: torch.Tensor,
    window: CanvasWindow,
    kind: torch.Tensor,
    whole: torch.Tensor,
    keys: torch.Tensor,
) -> ClassPaths:
    """A path through each canvas, drawn with a probability proportional to exp(its weight).

    This is forward filtering, backward sampling with the two directions exchanged.

    Args:
        batch: the automata of the ``n`` canvases.
        weights: ``[n, L, C + 1]``, the log-sum-exp of the weights of the tokens of each class.
        window: of the canvases.
        kind: int64 ``[n, L]``, the class of each forced token, C if it has none.
        whole: float32 ``[n, L]``, the log-sum-exp of the weights of all tokens, allowed or not.
        keys: int64 ``[n, L]``, the noise key of each position, see `row_keys`.
    """
    allowed = _allowed_weights(weights, window, kind).mul_(LOG2_E)
    labels = _label_weights(batch, allowed, _segment_log2_sum)
    _weigh_behind_end(batch, labels, window, whole.double() * LOG2_E)
    table = _backward_messages(batch, labels, window, _segment_log2_sum)
    paths = _forward_walk(batch, table, allowed, window, keys)
    return ClassPaths(paths.classes, paths.states, paths.feasible, paths.weight / LOG2_E)


def _allowed_weights(
    weights: torch.Tensor, window: CanvasWindow, kind: torch.Tensor
) -> torch.Tensor:
    """The weights, float64 ``[n, L, C + 1]``; where a token is forced, 0 for its class alone."""
    allowed = weights.double().nan_to_num_(FLOOR, -FLOOR, FLOOR).clamp_(FLOOR, -FLOOR)
    is_forced, kind = window.forced >= 0, kind[..., None]
    own = torch.where(is_forced, 0.0, allowed.gather(2, kind)[..., 0])
    allowed.masked_fill_(is_forced[..., None], -torch.inf)
    return allowed.scatter_(2, kind, own[..., None])


def _segment_max(data: torch.Tensor, count: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """The maximum of each group of adjacent rows; `scatter_reduce_` is twice as fast on a CPU."""
    if data.device.type != "cpu":
        return torch.segment_reduce(data, "max", lengths=count, axis=0, unsafe=True)
    top = data.new_full((len(count), *data.shape[1:]), -torch.inf)
    index = group if data.ndim == 1 else group[:, None].expand_as(data)
    return top.scatter_reduce_(0, index, data, "amax")


def _segment_log2_sum(data: torch.Tensor, count: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """The base-2 logarithm of the sum of powers of 2 of each group of adjacent rows."""
    top = _segment_max(data, count, group).clamp_min_(LOWEST)
    share = (data - top.index_select(0, group)).exp2_()
    return torch.segment_reduce(share, "sum", lengths=count, axis=0, unsafe=True).log2_().add_(top)


def _label_weights(
    batch: AutomatonBatch, allowed: torch.Tensor, reduce: SegmentReduce
) -> torch.Tensor:
    """The weight of each label at each position, float64 ``[L, labels]``."""
    count, length, classes = allowed.shape
    by_class = allowed.transpose(1, 2).reshape(count * classes, length)
    members = by_class.index_select(0, batch.bundle_canvas * classes + batch.bundle_class)
    bundles = reduce(members, batch.bundle_count, batch.class_bundle)  # [bundles, L]
    parts = bundles.index_select(0, batch.part)
    return reduce(parts, batch.part_count, batch.part_label).t().contiguous()


def _weigh_behind_end(
    batch: AutomatonBatch, labels: torch.Tensor, window: CanvasWindow, whole: torch.Tensor
) -> None:
    """Make free positions after the end of a text weigh `whole`, ``[n, L]``; in place."""
    own = labels.index_select(1, batch.end_label)  # [L, n]
    free = whole.double().nan_to_num(FLOOR, -FLOOR, FLOOR).clamp_(FLOOR, -FLOOR).t()
    free = torch.where(window.forced.t() < 0, torch.maximum(own, free), own)
    labels.index_copy_(1, batch.end_label, free)


def _backward_messages(
    batch: AutomatonBatch, labels: torch.Tensor, window: CanvasWindow, reduce: SegmentReduce
) -> torch.Tensor:
    """The message of each state before each position, and the labels of the position before.

    Returns:
        float64 ``[L + 1, S + labels]``, so that everything that an edge adds up is in one row. If
        a position cannot be in a state, the message is -inf.
    """
    length, states = len(labels), len(batch.canvas)
    budget_left = window.budget - (window.end - window.first)
    possible = batch.distance <= budget_left.index_select(0, batch.canvas)
    inside = window.inside().t().index_select(1, batch.canvas)  # [L, S]
    table = labels.new_full((length + 1, states + labels.shape[1]), -torch.inf)
    table[1:, states:].copy_(labels)
    table[length, :states].masked_fill_(possible, 0)
    # Tensors are unbound once before the loop, because most of the loop's time is call overhead.
    rows = table[:, :states].unbind(0)
    steps = list(enumerate(zip(rows, rows[1:], labels.unbind(0), inside.unbind(0), strict=False)))
    for position, (message, next_message, label, active) in reversed(steps):
        near, leaving = batch.at(position)
        edges = next_message.index_select(0, batch.edge_target[:leaving])
        edges += label.index_select(0, batch.edge_label[:leaving])
        through = reduce(edges, batch.edge_count[:near], batch.edge_source[:leaving])
        torch.where(active[:near], through, next_message[:near], out=message[:near])
    return table


def _forward_walk(
    batch: AutomatonBatch,
    table: torch.Tensor,
    allowed: torch.Tensor,
    window: CanvasWindow,
    keys: torch.Tensor | None = None,
) -> ClassPaths:
    """Walk forward, each time over the edge whose label and message add up to the most.

    With keys, Gumbel noise of their base is added to both, which turns the maximum into a sample.
    """
    inside = window.inside()
    rank = torch.arange(batch.most_edges, device=inside.device)
    state = batch.number.index_select(0, window.state + batch.first_state)
    weight = table[window.first, state]
    feasible = weight > -torch.inf
    # If there is no path, the walk stays where it is, because it must not stray to another canvas.
    moves = (inside & feasible[:, None]).t()
    noise = [None] * len(moves) if keys is None else _noise(keys, FIRST_EDGE_INDEX + rank)
    chosen, states = [], [state]
    for row, active, luck in zip(table[1:], moves, noise, strict=True):
        index = batch.first_edge.index_select(0, state)[:, None] + rank  # [n, edges]
        edge = batch.edge[index]
        score = row[edge[..., :2]].sum(-1)
        if luck is not None:
            score += luck
        score.masked_fill_(edge[..., 2] != state[:, None], -torch.inf)
        pick = score.argmax(1)[:, None, None]
        target, kind, _ = edge.gather(1, pick.expand(-1, 1, 3))[:, 0].unbind(1)
        state = torch.where(active, target, state)
        chosen.append(kind)
        states.append(state)
    label = torch.stack(chosen, 1) - len(batch.canvas)
    classes = _classes_of_labels(batch, label, allowed, keys)
    none = allowed.shape[2] - 1
    return ClassPaths(
        classes.masked_fill_(~inside, none),
        batch.own[torch.stack(states, 1)],
        feasible,
        weight,
    )


def _classes_of_labels(
    batch: AutomatonBatch, label: torch.Tensor, allowed: torch.Tensor, keys: torch.Tensor | None
) -> torch.Tensor:
    """The best class of a label (``[n, L]``) at each position, or a drawn one; int64 ``[n, L]``."""
    place = torch.arange(batch.most_members, device=label.device)
    index = batch.first_member[label][..., None] + place
    kind = batch.member[index]  # [n, L, members]
    score = allowed.gather(2, kind)
    if keys is not None:
        flat = kind.flatten(0, 1)
        noise = gumbel(keys.flatten(), FIRST_CLASS_INDEX + flat).view(score.shape)
        score.add_(noise, alpha=LOG2_E)
    score.masked_fill_(place >= batch.member_count[label][..., None], -torch.inf)
    return kind.gather(2, score.argmax(-1, keepdim=True))[..., 0]


def _noise(keys: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Gumbel noise to base 2 for keys ``[n, L]`` and indices ``[k]``: ``[L, n, k]``."""
    noise = gumbel(keys.t().flatten(), index) * LOG2_E
    return noise.view(*keys.t().shape, -1)
