"""The best path of a canvas through an automaton, or a sampled one, by dynamic programming.

A canvas of L positions gives each class of tokens a weight at each position. A path is one class
for each position of the canvas' *window*. It starts in a given state and ends in a state from which
the rest of the token budget is enough to finish the text. Its weight is the sum of the weights of
its classes.

First, messages are passed from the last position to the first. The message of a state is the
largest weight of any path from that state on (Viterbi), or the logarithm of the sum over all paths.
Then one walk from the first position to the last chooses a class at each position, greedily or at
random, among those that the automaton allows there. The result is exact, and the walk never runs
into a dead end.

Weights are added in float64: over a canvas of 256 positions they add up to thousands, and in
float32 close paths would become ties. The loop is over positions only; states, classes and canvases
are tensor dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

from vllm_dllm.constraints.automaton.distance import DEAD
from vllm_dllm.constraints.automaton.token_automaton import NO_CLASS, TokenAutomaton
from vllm_dllm.ops.noise.keyed import gumbel

# The smallest weight. Clamping keeps every class possible that the automaton allows: a model may
# rule out all tokens that the constraint allows, and the output must still be valid.
FLOOR = -1e6
# Classes draw their noise from the keys of a position at indices beyond those that token ids and
# groups of ids use.
FIRST_CLASS_INDEX = 3 << 29
# From rows [rows, n], the size of each group and the group of each row to [groups, n].
SegmentReduce = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class DeviceAutomaton:
    """A `TokenAutomaton` on a device. Below, ``S`` and ``C`` are its states and classes.

    Attributes:
        next: int64 ``[S + 1, C]``, the state after a class. S is the dead state, which
            leads only to itself.
        class_of_token: int64 ``[ids]``; C for tokens of no class.
        distance: int64 ``[S]``, the fewest tokens to the end of the text.
        edge_source, edge_target, edge_label: int64 ``[edges]``, by ascending source.
        edge_count: int64 ``[S]``, the number of edges that leave each state.
        members: int64, the classes of all labels, one label after the other.
        member_label: int64, the label of each member.
        member_count: int64 ``[labels]``, the number of classes of each label.
        end_token: the lowest id that ends a text.
    """

    next: torch.Tensor
    class_of_token: torch.Tensor
    distance: torch.Tensor
    edge_source: torch.Tensor
    edge_target: torch.Tensor
    edge_label: torch.Tensor
    edge_count: torch.Tensor
    members: torch.Tensor
    member_label: torch.Tensor
    member_count: torch.Tensor
    end_token: int

    @classmethod
    def of(cls, automaton: TokenAutomaton, device: torch.device) -> DeviceAutomaton:
        """A copy on a device."""

        def copied(array: object) -> torch.Tensor:
            return torch.as_tensor(array, dtype=torch.int64, device=device)

        states, classes = automaton.states, automaton.classes
        table = torch.nn.functional.pad(copied(automaton.next), (0, 0, 0, 1), value=DEAD)
        kinds = copied(automaton.class_of_token)
        source = copied(automaton.edge_source)
        sizes = copied(automaton.label_first).diff()
        return cls(
            next=torch.where(table == DEAD, states, table),
            class_of_token=torch.where(kinds == NO_CLASS, classes, kinds),
            distance=copied(automaton.distance),
            edge_source=source,
            edge_target=copied(automaton.edge_target),
            edge_label=copied(automaton.edge_label),
            edge_count=torch.bincount(source, minlength=states),
            members=copied(automaton.members),
            member_label=torch.arange(len(sizes), device=device).repeat_interleave(sizes),
            member_count=sizes,
            end_token=int((kinds == classes - 1).nonzero()[0, 0]),
        )

    @property
    def states(self) -> int:
        """S."""
        return len(self.distance)

    @property
    def classes(self) -> int:
        """C."""
        return self.next.shape[1]


@dataclass(frozen=True)
class CanvasWindow:
    """The positions of each canvas that must follow the automaton, and the state to start from.

    Attributes:
        state: int64 ``[n]``, the automaton's state before the window.
        first: int64 ``[n]``, the window's first position: after the part of the prompt that is in
            the canvas, and after the tokens of the canvas that have been emitted.
        budget: int64 ``[n]``, how many tokens may be emitted from `first` on, including the one
            that ends the text.
        width: int64 ``[n]``, number of positions that the canvas has, at most L.
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
    automaton: DeviceAutomaton, weights: torch.Tensor, window: CanvasWindow
) -> ClassPaths:
    """The path of the largest weight in each canvas (Viterbi). Ties go to the lowest class.

    Args:
        automaton: the constraint of all these canvases.
        weights: ``[n, L, C]``, any floating dtype.
        window: of ``n`` canvases.
    """
    allowed = _allowed_weights(automaton, weights, window)
    messages = _backward_messages(automaton, allowed, window, _segment_max)
    return _forward_walk(automaton, allowed, messages, window)


def drawn_paths(
    automaton: DeviceAutomaton, weights: torch.Tensor, window: CanvasWindow, keys: torch.Tensor
) -> ClassPaths:
    """A path through each canvas, drawn with a probability proportional to exp(its weight).

    This is forward filtering, backward sampling with the two directions exchanged.

    Args:
        automaton: the constraint of all these canvases.
        weights: ``[n, L, C]``, the log-sum-exp of the weights of the tokens of each class.
        window: of ``n`` canvases.
        keys: int64 ``[n, L]``, the noise key of each position, see `row_keys`.
    """
    allowed = _allowed_weights(automaton, weights, window)
    messages = _backward_messages(automaton, allowed, window, _segment_logsumexp)
    index = FIRST_CLASS_INDEX + torch.arange(automaton.classes, device=keys.device)
    noise = gumbel(keys.t().flatten(), index).view(*keys.t().shape, -1)  # [L, n, C]
    return _forward_walk(automaton, allowed, messages, window, noise.transpose(1, 2))


def _allowed_weights(
    automaton: DeviceAutomaton, weights: torch.Tensor, window: CanvasWindow
) -> torch.Tensor:
    """The weights, float64 ``[L, C, n]``; where a token is forced, -inf for all other classes."""
    allowed = weights.permute(1, 2, 0).double().contiguous()
    allowed = allowed.nan_to_num(FLOOR, -FLOOR, FLOOR).clamp_min(FLOOR)
    forced = window.forced.t()[:, None]  # [L, 1, n]
    kind = automaton.class_of_token[forced.clamp_min(0)]
    every = torch.arange(automaton.classes, device=allowed.device)[:, None]
    return allowed.masked_fill((forced >= 0) & (kind != every), -torch.inf)


def _segment_max(data: torch.Tensor, count: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """The maximum of each group of adjacent rows, ``[rows, n]`` to ``[groups, n]``."""
    return torch.segment_reduce(data, "max", lengths=count, axis=0, unsafe=True)


def _segment_logsumexp(
    data: torch.Tensor, count: torch.Tensor, group: torch.Tensor
) -> torch.Tensor:
    """The log-sum-exp of each group of adjacent rows, ``[rows, n]`` to ``[groups, n]``."""
    top = _segment_max(data, count, group)
    top = torch.where(top == -torch.inf, 0.0, top)
    share = (data - top[group]).exp_()
    return torch.segment_reduce(share, "sum", lengths=count, axis=0, unsafe=True).log_() + top


def _backward_messages(
    automaton: DeviceAutomaton, allowed: torch.Tensor, window: CanvasWindow, reduce: SegmentReduce
) -> torch.Tensor:
    """The message of each state before each position, float64 ``[L + 1, S + 1, n]``."""
    length, _, count = allowed.shape
    by_class = allowed.transpose(0, 1).flatten(1)  # [C, L * n]
    members = by_class.index_select(0, automaton.members)
    labels = reduce(members, automaton.member_count, automaton.member_label)
    labels = labels.view(-1, length, count)
    budget_left = window.budget - (window.end - window.first)
    possible = automaton.distance[:, None] <= budget_left
    messages = allowed.new_full((length + 1, automaton.states + 1, count), -torch.inf)
    messages[length, :-1].masked_fill_(possible, 0)
    # Tensors are unbound once before the loop, because most of the loop's time is call overhead.
    rows = messages[:, :-1].unbind(0)
    steps = list(zip(rows, rows[1:], labels.unbind(1), window.inside().t().unbind(0), strict=False))
    for message, next_message, label, inside in reversed(steps):
        edges = next_message.index_select(0, automaton.edge_target)
        edges += label.index_select(0, automaton.edge_label)
        through = reduce(edges, automaton.edge_count, automaton.edge_source)
        torch.where(inside, through, next_message, out=message)
    return messages


def _forward_walk(
    automaton: DeviceAutomaton,
    allowed: torch.Tensor,
    messages: torch.Tensor,
    window: CanvasWindow,
    noise: torch.Tensor | None = None,
) -> ClassPaths:
    """Walk forward, each time to the class whose weight and message add up to the most.

    `noise`, ``[L, C, n]``, is added to the weights; Gumbel noise turns the maximum into a sample.
    """
    if noise is not None:
        allowed = allowed + noise
    state = window.state
    weight = messages[0].gather(0, state[None])[0]
    inside = window.inside().t()
    chosen, states = [], [state]
    for message, weights, active in zip(messages[1:], allowed, inside, strict=True):
        target = automaton.next.index_select(0, state).t()  # [C, n]
        kind = message.gather(0, target).add_(weights).argmax(0, keepdim=True)
        state = torch.where(active, target.gather(0, kind)[0], state)
        chosen.append(kind)
        states.append(state)
    classes = torch.where(inside, torch.cat(chosen), automaton.classes).t()
    return ClassPaths(classes, torch.stack(states, 1), weight > -torch.inf, weight)
