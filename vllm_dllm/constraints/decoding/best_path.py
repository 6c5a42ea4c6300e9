"""The best path of a canvas through an automaton, or one drawn from all: dynamic programming.

A canvas of L positions gives each class of tokens a weight at each position. A path is a class for
each position of a *window*, beginning in a given state and ending where the rest of the budget is
enough to finish. Its weight is the sum of its classes'. Messages run from the end to the start:
what each state is still worth (the largest weight of a path from there, or the logarithm of the
sum over all); then one walk forward chooses at each position, greedily or by chance, between the
classes that the automaton allows there. So the walk is exact, and never comes to a dead end.

Weights are added in float64: a canvas of 256 positions adds up to thousands, and float32 would not
keep ties apart. The loop is over positions; states, classes and canvases are tensor dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

from vllm_dllm.constraints.automaton.distance import DEAD
from vllm_dllm.constraints.automaton.token_automaton import NO_CLASS, TokenAutomaton
from vllm_dllm.ops.noise.keyed import gumbel

# What the least weight counts as, so that a class that is allowed is always possible: a model may
# rule out every token that the constraint allows, and the output must be valid all the same.
FLOOR = -1e6
# Classes draw from the keys of their position behind any token id and any group of ids.
FIRST_CLASS_INDEX = 3 << 29
# (rows [rows, n], how many each group has, the group of each row) to [groups, n].
Fold = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class DeviceAutomaton:
    """A `TokenAutomaton` on a device. Below, ``S`` and ``C`` are its states and classes.

    Attributes:
        next: int64 ``[S + 1, C]``; S stands for a dead end, from where all is dead.
        class_of_token: int64 ``[ids]``; C stands for no class.
        distance: int64 ``[S]``.
        edge_target, edge_label: int64 ``[edges]``, by ascending source.
        edge_source: the same, for sums.
        edge_count: int64 ``[S]``, how many edges each state has.
        members: int64, the classes of all labels; `member_count` int64 ``[labels]``.
        member_label: the label of each member.
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
        """Copied to a device."""

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
class Window:
    """Which positions of canvases an automaton is to follow, and from where.

    Attributes:
        state: int64 ``[n]``, the automaton's state before the window.
        first: int64 ``[n]``, the window's first position: behind the prompt's tail, and behind
            what has been put out of the canvas.
        budget: int64 ``[n]``, tokens that may be put out from `first` on, the one that ends the
            text included.
        width: int64 ``[n]``, positions of the canvas that exist, at most L.
        forced: int64 ``[n, L]``, tokens that stay, -1 where the path is free. Outside of the window
            the automaton does not see them.
    """

    state: torch.Tensor
    first: torch.Tensor
    budget: torch.Tensor
    width: torch.Tensor
    forced: torch.Tensor

    @property
    def end(self) -> torch.Tensor:
        """Int64 ``[n]``, the position behind the window."""
        return torch.minimum(self.first + self.budget, self.width).clamp_min(self.first)

    def inside(self) -> torch.Tensor:
        """Bool ``[n, L]``, positions of the window."""
        position = torch.arange(self.forced.shape[1], device=self.forced.device)
        return (position >= self.first[:, None]) & (position < self.end[:, None])

    def part(self, some: slice) -> Window:
        """Those of some canvases that stand together."""
        return Window(*(getattr(self, f.name)[some] for f in fields(self)))

    def take(self, index: torch.Tensor) -> Window:
        """Those of some canvases, int64 ``[m]``."""
        return Window(*(getattr(self, f.name).index_select(0, index) for f in fields(self)))


@dataclass(frozen=True)
class Paths:
    """A path for each canvas.

    Attributes:
        classes: int64 ``[n, L]``; C outside of the window.
        states: int64 ``[n, L + 1]``, the state before each position, and behind the last.
        feasible: bool ``[n]``; where false the forced tokens and the budget leave no path, and
            the rest means nothing.
        weight: float64 ``[n]``, the weight of the best path, or the logarithm of the sum of all.
    """

    classes: torch.Tensor
    states: torch.Tensor
    feasible: torch.Tensor
    weight: torch.Tensor


def best_paths(automaton: DeviceAutomaton, weights: torch.Tensor, window: Window) -> Paths:
    """The path of the largest weight in each canvas (Viterbi); ties go to the lowest class.

    Args:
        automaton: the constraint of all these canvases.
        weights: ``[n, L, C]``, any floating dtype.
        window: of ``n`` canvases.
    """
    held = _held(automaton, weights, window)
    messages = _messages(automaton, held, window, _largest)
    return _walk(automaton, held, messages, window)


def drawn_paths(
    automaton: DeviceAutomaton, weights: torch.Tensor, window: Window, keys: torch.Tensor
) -> Paths:
    """A path of each canvas, drawn with probability proportional to exp(its weight).

    Forward filtering and backward sampling, with the roles of the directions exchanged.

    Args:
        automaton: the constraint of all these canvases.
        weights: ``[n, L, C]``; of a class of tokens, the logarithm of the sum of their weights.
        window: of ``n`` canvases.
        keys: int64 ``[n, L]``, what each position draws with, see `noise.row_keys`.
    """
    held = _held(automaton, weights, window)
    messages = _messages(automaton, held, window, _summed)
    index = FIRST_CLASS_INDEX + torch.arange(automaton.classes, device=keys.device)
    noise = gumbel(keys.t().flatten(), index).view(*keys.t().shape, -1)  # [L, n, C]
    return _walk(automaton, held, messages, window, noise.transpose(1, 2))


def _held(automaton: DeviceAutomaton, weights: torch.Tensor, window: Window) -> torch.Tensor:
    """Weights float64 ``[L, C, n]``, with only the token's class where a token is forced."""
    held = weights.permute(1, 2, 0).double().contiguous()
    held = held.nan_to_num(FLOOR, -FLOOR, FLOOR).clamp_min(FLOOR)
    forced = window.forced.t()[:, None]  # [L, 1, n]
    kind = automaton.class_of_token[forced.clamp_min(0)]
    every = torch.arange(automaton.classes, device=held.device)[:, None]
    return held.masked_fill((forced >= 0) & (kind != every), -torch.inf)


def _largest(data: torch.Tensor, count: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """The maxima of groups of rows that lie together, ``[rows, n]`` to ``[groups, n]``."""
    return torch.segment_reduce(data, "max", lengths=count, axis=0, unsafe=True)


def _summed(data: torch.Tensor, count: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """The logarithms of the sums of exponentials of such groups."""
    top = _largest(data, count, group)
    top = torch.where(top == -torch.inf, 0.0, top)
    share = (data - top[group]).exp_()
    return torch.segment_reduce(share, "sum", lengths=count, axis=0, unsafe=True).log_() + top


def _messages(
    automaton: DeviceAutomaton, held: torch.Tensor, window: Window, fold: Fold
) -> torch.Tensor:
    """What each state is worth before each position, float64 ``[L + 1, S + 1, n]``."""
    length, _, count = held.shape
    by_class = held.transpose(0, 1).flatten(1)  # [C, L * n]
    members = by_class.index_select(0, automaton.members)
    labels = fold(members, automaton.member_count, automaton.member_label)
    labels = labels.view(-1, length, count)
    left = window.budget - (window.end - window.first)
    possible = automaton.distance[:, None] <= left
    worth = held.new_full((length + 1, automaton.states + 1, count), -torch.inf)
    worth[length, :-1].masked_fill_(possible, 0)
    # What a loop over positions looks at is cut up before it: most of its time is overhead.
    rows = worth[:, :-1].unbind(0)
    steps = list(zip(rows, rows[1:], labels.unbind(1), window.inside().t().unbind(0), strict=False))
    for before, behind, label, inside in reversed(steps):
        edges = behind.index_select(0, automaton.edge_target)
        edges += label.index_select(0, automaton.edge_label)
        found = fold(edges, automaton.edge_count, automaton.edge_source)
        torch.where(inside, found, behind, out=before)
    return worth


def _walk(
    automaton: DeviceAutomaton,
    held: torch.Tensor,
    worth: torch.Tensor,
    window: Window,
    noise: torch.Tensor | None = None,
) -> Paths:
    """From the start on, always to what is worth most; with `noise` ``[L, C, n]`` added to it."""
    if noise is not None:
        held = held + noise
    state = window.state
    weight = worth[0].gather(0, state[None])[0]
    inside = window.inside().t()
    chosen, states = [], [state]
    for after, weights, active in zip(worth[1:], held, inside, strict=True):
        behind = automaton.next.index_select(0, state).t()  # [C, n]
        kind = after.gather(0, behind).add_(weights).argmax(0, keepdim=True)
        state = torch.where(active, behind.gather(0, kind)[0], state)
        chosen.append(kind)
        states.append(state)
    classes = torch.where(inside, torch.cat(chosen), automaton.classes).t()
    return Paths(classes, torch.stack(states, 1), weight > -torch.inf, weight)


def advance(
    automaton: DeviceAutomaton, state: torch.Tensor, tokens: torch.Tensor, count: torch.Tensor
) -> torch.Tensor:
    """The states behind some tokens.

    Args:
        automaton: the constraint.
        state: int64 ``[n]``, before the first token.
        tokens: int64 ``[n, K]``, ids.
        count: int64 ``[n]``, how many of each row have been put out.

    Returns:
        int64 ``[n]``; ``automaton.states`` where a token was not allowed.
    """
    table = torch.nn.functional.pad(automaton.next, (0, 1), value=automaton.states)
    kinds = automaton.class_of_token[tokens]
    for at in range(tokens.shape[1]):
        state = torch.where(at < count, table[state, kinds[:, at]], state)
    return state
