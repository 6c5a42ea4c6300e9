"""The constraints of running requests, and the state that each has reached.

This module is loaded for the first request that has a constraint, and only this module knows how
paths through an automaton are found. One step serves all constrained canvases of a batch, whatever
their automata; see `canvas_grammar.decoding` for the computation.

The canvas of a large constraint follows only the part near the canvas' first state, and only the
host can find that part. When a canvas leaves, the next one *waits*: steps leave it unchanged. Which
canvases wait, and their states, is copied to the host after every step, and the host answers at the
first step that can read the copy without waiting for the device. On a GPU each canvas waits for one
step, because the host prepares a step while the previous one is running. The number of steps
depends on nothing else, so all ranks agree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache

import numpy as np
import torch
from canvas_grammar import CompiledConstraint, CompileLimits
from canvas_grammar.automaton.configurations import NO_STATE, START, Configurations
from canvas_grammar.automaton.windows import window
from canvas_grammar.decoding.automaton_batch import AutomatonBatch, OwnEdges
from canvas_grammar.decoding.best_path import CanvasWindow
from canvas_grammar.decoding.canvas_logits import CanvasLogits, FreeTokens
from canvas_grammar.decoding.constrained_step import (
    BatchConstraint,
    ConstrainedPath,
    best_and_drawn_tokens,
    best_tokens,
    drawn_tokens,
    path_probability,
)
from canvas_grammar.decoding.token_classes import BatchClasses, TokenClasses

from vllm_dllm.engine.readout import ReadRequest
from vllm_dllm.engine.slots import SlotState
from vllm_dllm.engine.step import FollowedPaths, StepPlan
from vllm_dllm.engine.to_device import can_pin, to_device
from vllm_dllm.engine.token_choice import MaskedRows, NoiseRows
from vllm_dllm.ops.statistics.rows import EntropyStatistics, SampledStatistics
from vllm_dllm.ops.statistics.sampled import draw_and_sum, with_drawn

# Roughly how many states a canvas follows, and how many parts of a constraint are cached.
MOST_STATES = CompileLimits().window_states
MOST_VIEWS = 64
# How many unions of automata, and of classes, are cached, one for each set of canvases. A steady
# batch has one set for each part that the readout splits it into, or two if some requests draw.
MOST_KEPT = 8


class Constraints:
    """The constraint of each slot (on the host) and its state (on the device).

    A canvas follows a part of its constraint that begins in the state before the canvas; see
    `canvas_grammar.automaton.windows`.

    Attributes:
        state: int64 ``[slots]``, the state in the slot's view after the tokens output so far.
        followed: by slot, the constraint of its request; slots with equal constraints share one.
        views: by slot, the part of its constraint that its canvas follows.
    """

    def __init__(self, slots: SlotState) -> None:
        count, device = len(slots.phase), slots.device
        self.slots = slots
        self.state = torch.zeros(count, dtype=torch.int64, device=device)
        self.followed: dict[int, SharedConstraint] = {}
        self.views: dict[int, View] = {}
        self.starts = CanvasStarts(count, device)
        self._automata = lru_cache(MOST_KEPT)(self._joined_automata)
        self._classes = lru_cache(MOST_KEPT)(self._joined_classes)

    def enter(self, slot: int, packed: bytes, output: Sequence[int]) -> None:
        """Set up ``slot`` for a request whose next canvas is a new one.

        Args:
            slot: the request's slot.
            packed: the request's packed constraint.
            output: the tokens that it had output before it was preempted.
        """
        self.leave(slot)
        self.slots.constrained[slot] = True
        digest = hashlib.sha256(packed).digest()
        same = (each for each in self.followed.values() if each.digest == digest)
        self.followed[slot] = next(same, None) or SharedConstraint(
            digest, packed, self.slots.length, self.slots.device
        )
        self.resume(slot, output, len(output))

    def resume(self, slot: int, output: Sequence[int], before: int) -> None:
        """Give ``slot`` the view of a canvas that has already begun.

        Args:
            slot: the slot of a request with a constraint.
            output: all tokens that the request has output.
            before: how many of them were output before the canvas began.
        """
        constraint = self.followed[slot]
        first = constraint.after(output[:before])
        view = self.views[slot] = constraint.view(START if first == NO_STATE else first)
        self.starts.enter(slot, moves=not view.whole)
        reached = NO_STATE if first == NO_STATE else constraint.after(output[before:], first)
        self.state[slot].fill_(view.place(reached))

    def _begin_canvases(self) -> None:
        """Give canvases that have begun the nearby part of their constraints."""
        for slot, place in self.starts.begun():
            self.views[slot], place = self.followed[slot].next_view(self.views[slot], place)
            self.state[slot].fill_(place)
            self.starts.answer(slot)

    def leave(self, slot: int) -> None:
        """Free ``slot``, and free its constraint unless other slots follow it."""
        self.slots.constrained[slot] = False
        self.starts.leave(slot)
        self.views.pop(slot, None)
        constraint = self.followed.pop(slot, None)
        if constraint is not None and constraint not in self.followed.values():
            self._automata.cache_clear()
            self._classes.cache_clear()

    def begin_step(self, plan: StepPlan, revises: torch.Tensor) -> ConstrainedStep:
        """Return what the canvases of a step must follow.

        Args:
            plan: the step's plan.
            revises: bool ``[n]``, canvases whose visible tokens may change in this step.
        """
        self._begin_canvases()
        now, before = plan.status, plan.before
        stays = torch.where(revises[:, None], before.fixed, ~before.masked)
        window = CanvasWindow(
            state=self.state.index_select(0, plan.slots),
            first=now.tail,
            budget=now.remaining,
            width=torch.zeros_like(now.tail) + plan.width,
            forced=torch.where(stays, before.tokens, -1),
        )
        waits = self.starts.waits(plan.slots, plan.on_host)
        return ConstrainedStep(self, plan.slots, window, ConstrainedPath.empty(window), waits)

    def for_batch(self, on_host: np.ndarray) -> BatchConstraint:
        """What constrained canvases must follow; cached for later steps with the same canvases.

        Args:
            on_host: their slots, int ``[n]``.
        """
        slots = on_host.tolist()
        automata = self._automata(*(self.views[slot] for slot in slots))
        return BatchConstraint(automata, self._classes(*(self.followed[slot] for slot in slots)))

    def _joined_automata(self, *views: View) -> AutomatonBatch:
        edges = [view.edges for view in views]
        return AutomatonBatch.union(edges, lambda array: to_device(array, self.slots.device))

    @staticmethod
    def _joined_classes(*constraints: SharedConstraint) -> BatchClasses:
        return BatchClasses.join([constraint.classes for constraint in constraints])


class ConstrainedStep:
    """What the canvases of a step must follow, those without a constraint among them.

    Attributes:
        slots: int64 ``[n]``, the slots of the batch.
        window: the canvases as their constraints see them: which tokens are fixed, and which may
            change.
        path: the paths of constrained canvases, written when they are chosen.
        waits: canvases whose constraint has not been looked up yet, which stay as they are; bool
            ``[n]``, or None if there can be none.
    """

    def __init__(
        self,
        constraints: Constraints,
        slots: torch.Tensor,
        window: CanvasWindow,
        path: ConstrainedPath,
        waits: torch.Tensor | None,
    ) -> None:
        self.constraints = constraints
        self.slots = slots
        self.window = window
        self.path = path
        self.waits = waits

    def part(self, rows: slice) -> ConstrainedStep:
        """The constraint of a slice of the canvases; its chosen paths are stored in the whole."""
        waits = None if self.waits is None else self.waits[rows]
        window, path = self.window.part(rows), self.path.part(rows)
        return ConstrainedStep(self.constraints, self.slots[rows], window, path, waits)

    def choose_paths(self, chosen: MaskedRows | NoiseRows, request: ReadRequest) -> None:
        """Replace the tokens chosen for constrained canvases with those of paths.

        Args:
            chosen: what was chosen from the whole rows of logits of these canvases; updated in
                place.
            request: the request for these canvases.
        """
        slots, on_host = self.constraints.slots, request.on_host
        constrained, samples = slots.constrained[on_host], slots.samples[on_host]
        for draws in (False, True):
            where = np.flatnonzero(constrained & (samples == draws))
            if not len(where):
                continue
            index = to_device(where, slots.device)
            constraint = self.constraints.for_batch(on_host[where])
            followed = Followed(constraint, self.window.take(index), index, where)
            if isinstance(chosen, MaskedRows):
                own = request.own_confidence_temperature
                path = follow_in_masked_rows(chosen, followed, draws, own)
            else:
                path = follow_in_noise_rows(chosen, followed, draws)
            self.path.put(index, path)

    def followed(self) -> FollowedPaths:
        """What the chosen paths say of the canvases of the batch."""
        path = self.path
        return FollowedPaths(path.token, path.inside, path.feasible, self.waits)

    def advance(self, out: torch.Tensor, leaves: torch.Tensor) -> None:
        """Advance the constraints by the tokens that were output.

        Args:
            out: int64 ``[n]``, length of the prefix of each canvas that has been output so far.
            leaves: bool ``[n]``, canvases after which the next one begins.
        """
        state = self.constraints.state
        # Where `out` has not grown, the state stays the same.
        state.index_copy_(0, self.slots, self.path.states.gather(1, out[:, None])[:, 0])
        self.constraints.starts.ask(state, self.slots, leaves)


@dataclass(frozen=True)
class Followed:
    """Some canvases of a part of a batch, and what they must follow.

    Attributes:
        constraint: what these ``m`` canvases must follow.
        window: these canvases as the constraint sees them.
        index: int64 ``[m]``, the canvases' positions in this part of the batch.
        on_host: the same positions on the host.
    """

    constraint: BatchConstraint
    window: CanvasWindow
    index: torch.Tensor
    on_host: np.ndarray

    def logits(self, rows: torch.Tensor) -> CanvasLogits:
        """Select the logits of these canvases from the part's rows, ``[n * L, ids]``."""
        length = self.window.forced.shape[1]
        return CanvasLogits(rows.unflatten(0, (-1, length)), self.index, self.on_host)


def follow_in_masked_rows(
    rows: MaskedRows, followed: Followed, draws: bool, own: torch.Tensor | None
) -> ConstrainedPath:
    """Replace a masked model's tokens and their confidences with those of paths.

    The confidence of a most probable path's token is its probability; that of a drawn path's
    token comes from `with_drawn`. Positions after the end of the text have confidence 1. `own` is
    `ReadRequest.own_confidence_temperature`.
    """
    statistics, shape, index = rows.statistics, (len(rows.samples), -1), followed.index
    greedy = rows.greedy.view(*shape).take(index)
    if draws and rows.tempered is not None and rows.filtered is not None:
        assert rows.keys is not None
        keys = rows.keys.index_select(0, index)
        kept, window = followed.logits(rows.filtered), followed.window
        free = kept.drawn(window.wanted(), keys, draw_and_sum)
        chosen = drawn_tokens(followed.constraint, kept, window, free, keys)
        tempered = followed.logits(rows.tempered)
        both = torch.stack([chosen.token, greedy.token], -1)
        weight, largest = tempered.pick(both).unbind(-1)
        own = None if own is None else own.index_select(0, index)[:, None]
        sampled = with_drawn(greedy, (weight - largest).exp(), chosen.inside, chosen.token, own)
        sure = torch.where(chosen.inside, sampled.probability, 1.0)
    else:
        logits = followed.logits(rows.logits)
        free = logits.best(greedy.token)
        chosen = best_tokens(followed.constraint, logits, followed.window, free)
        sure = path_probability(chosen, free.weight, greedy.probability)
    statistics.token.view(shape).index_copy_(0, index, chosen.token)
    statistics.probability.view(shape).index_copy_(0, index, sure)
    if isinstance(statistics, EntropyStatistics):
        every = statistics.entropy.view(shape)
        entropy = torch.where(chosen.inside, every.index_select(0, index), 0.0)
        every.index_copy_(0, index, entropy)
    return chosen


def follow_in_noise_rows(rows: NoiseRows, followed: Followed, draws: bool) -> ConstrainedPath:
    """Replace a uniform-noise model's tokens with those of the best path and of a drawn path.

    Entropies remain those of the model, because the algorithm decides what it accepts. They are 0
    after the budget. After the end of a path's text a canvas keeps what the model writes there
    (DiffusionGemma does not repeat end-of-sequence tokens), because the model reads it again.
    """
    constraint, window, own = followed.constraint, followed.window, rows.statistics
    logits = followed.logits(rows.logits)
    free = logits.best(own.token[None])
    if draws:
        warmth, keys = rows.temperature[None], rows.keys[None]
        sampled = FreeTokens(own.sample[None], free.weight / warmth - own.probability.log())
        best, drawn = best_and_drawn_tokens(
            constraint, logits, warmth, window, (free, sampled), keys
        )
    else:
        best = drawn = best_tokens(constraint, logits, window, free)
    token = torch.where(constraint.behind_end(best)[0], own.token, best.token[0])
    sample = torch.where(constraint.behind_end(drawn)[0], own.sample, drawn.token[0])
    pick = [rows.distribution.gather(1, ids[:, None])[:, 0] for ids in (token, sample)]
    entropy = torch.where(best.inside[0], own.entropy, 0.0)
    rows.statistics = SampledStatistics(token, pick[0], sample, pick[1], entropy)
    return best


@dataclass(frozen=True, eq=False)
class View:
    """The part of a constraint that a canvas follows.

    Attributes:
        edges: its automaton on the host, ready to be joined with others.
        states: int64 ``[states]``, the number of each of its states in the constraint.
        whole: whether this is the whole constraint, so that every canvas may follow it.
    """

    edges: OwnEdges
    states: np.ndarray
    whole: bool

    def place(self, state: int) -> int:
        """The number of a constraint's state in this part, or the dead state if it is absent."""
        found = np.flatnonzero(self.states == state)
        return int(found[0]) if len(found) else self.edges.dead


class SharedConstraint:
    """A constraint that one or more running requests follow.

    Attributes:
        digest: SHA-256 of the packed constraint.
        configurations: its states, explored as far as canvases reach.
        classes: its classes of tokens, on the device.
    """

    def __init__(self, digest: bytes, packed: bytes, length: int, device: torch.device) -> None:
        """Unpack the constraint that comes with a request, and copy its classes to the device.

        Everything that depends on the constraint's values is computed on the host, so nothing waits
        for the device. `length` is L.
        """
        self.digest = digest
        self.length = length
        self.configurations: Configurations = CompiledConstraint(packed).configurations()
        tables = self.configurations.tables
        classes = TokenClasses.from_class_of_token(tables.class_of_token, tables.classes)
        self.classes = _on_device(classes, device)
        self._first = self._window(START)
        self._later = lru_cache(MOST_VIEWS)(self._window)

    def view(self, state: int) -> View:
        """The part that a canvas beginning in this state follows."""
        return self._first if self._first.whole or state == START else self._later(state)

    def _window(self, state: int) -> View:
        found = window(self.configurations, state, self.length, MOST_STATES)
        edges = OwnEdges.from_automaton(found.automaton, found.depth)
        return View(edges, found.states, found.whole)

    def after(self, tokens: Iterable[int], state: int = START) -> int:
        """The state reached after these tokens, or `NO_STATE`."""
        for token in tokens:
            state = self.configurations.after(state, token)
        return state

    def next_view(self, view: View, place: int) -> tuple[View, int]:
        """The view of a canvas that begins at a place of a view, and its place there."""
        if place >= view.edges.dead:
            return view, view.edges.dead
        state = int(view.states[place])
        found = self.view(state)
        return found, found.place(state)


def _on_device(classes: TokenClasses, device: torch.device) -> TokenClasses:
    """A copy with its tensors on the device."""
    named = {f.name: getattr(classes, f.name) for f in fields(classes)}
    tensors = {name: part for name, part in named.items() if isinstance(part, torch.Tensor)}
    return replace(classes, **{name: to_device(part, device) for name, part in tensors.items()})


class _Copy:
    """A buffer on the host for one copy from the device."""

    def __init__(self, slots: int, device: torch.device) -> None:
        pinned = can_pin(device)
        self.tensor = torch.zeros((2, slots), dtype=torch.int64, pin_memory=pinned)
        # Marks a copy as complete; None where copying is synchronous.
        self.event = torch.Event(device) if pinned else None

    @cached_property
    def array(self) -> np.ndarray:
        """The buffer itself."""
        return self.tensor.numpy()

    def take(self, values: torch.Tensor) -> None:
        """Start a copy."""
        self.tensor.copy_(values, non_blocking=True)
        if self.event is not None:
            self.event.record()

    def read(self) -> np.ndarray:
        """Return the copied values, waiting for the copy if necessary."""
        if self.event is not None:
            self.event.synchronize()
        return self.array


class CanvasStarts:
    """Tracks canvases that have begun and wait for the part of the constraint that they follow.

    Attributes:
        late: how many steps pass between a copy and its use, 0 or 1.
        waiting: bool ``[slots]``, canvases that wait.
    """

    def __init__(self, slots: int, device: torch.device, late: int | None = None) -> None:
        self.late = int(can_pin(device)) if late is None else late
        self.waiting = torch.zeros(slots, dtype=torch.bool, device=device)
        # Which constraints are larger than a view, on the device and on the host.
        self._moving = torch.zeros(slots, dtype=torch.bool, device=device)
        self._moves: np.ndarray = np.zeros(slots, dtype=bool)
        # Copies are numbered; those before a slot's request or last answer do not count for it.
        self._first: np.ndarray = np.zeros(slots, dtype=np.int64)
        self._next = 0
        self._free = [_Copy(slots, device) for _ in range(self.late + 1)]
        self._in_flight: list[tuple[int, _Copy]] = []

    def enter(self, slot: int, moves: bool) -> None:
        """Set up ``slot`` for a canvas that has its part; `moves` if the next may need another."""
        self._moves[slot] = moves
        self._moving[slot].fill_(moves)
        self.answer(slot)

    def leave(self, slot: int) -> None:
        """Stop expecting canvases of ``slot``, whose next request may have no constraint."""
        if self._moves[slot]:
            self._moves[slot] = False
            self.waiting[slot].fill_(False)

    def waits(self, slots: torch.Tensor, on_host: np.ndarray) -> torch.Tensor | None:
        """Canvases that have no answer yet, bool ``[n]``; None if none can be waiting.

        Args:
            slots: int64 ``[n]``, the slots of the batch.
            on_host: the same on the host.
        """
        if not self.late or not self._moves[on_host].any():
            return None
        return self.waiting.index_select(0, slots)

    def ask(self, states: torch.Tensor, slots: torch.Tensor, leaves: torch.Tensor) -> None:
        """Let the canvases that follow those that leave wait for their parts, and start the copy.

        Args:
            states: int64, the states of all slots.
            slots: int64 ``[n]``, the slots of the batch.
            leaves: bool ``[n]``, whose canvas leaves.
        """
        if not self._moves.any():
            return
        begun = leaves & self._moving.index_select(0, slots)
        self.waiting.index_copy_(0, slots, self.waiting.index_select(0, slots) | begun)
        copy = self._free.pop()
        copy.take(torch.stack([self.waiting.long(), states]))
        self._in_flight.append((self._next, copy))
        self._next += 1

    def begun(self) -> Iterator[tuple[int, int]]:
        """Iterate over the slots that wait and the states in which their canvases begin."""
        while len(self._in_flight) > self.late:
            number, copy = self._in_flight.pop(0)
            waiting, states = copy.read()
            slots = np.flatnonzero(self._moves & (waiting > 0) & (self._first <= number))
            found = list(zip(slots.tolist(), states[slots].tolist(), strict=True))
            self._free.append(copy)
            yield from found

    def answer(self, slot: int) -> None:
        """Record that the canvas of ``slot`` has its part of the constraint."""
        self.waiting[slot].fill_(False)
        self._first[slot] = self._next
