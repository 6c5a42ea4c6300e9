"""The constraints of running requests, and the state that each has reached.

One step serves all constrained canvases of a batch, whatever their automata; see
`canvas_grammar.decoding` for the computation.

The canvas of a large constraint follows only the part near the canvas' first state, and only the
host can find that part. When a canvas leaves, the next one *waits*: steps leave it unchanged. Which
canvases wait, and their states, is copied to the host after every step, and the host reads the copy
at the first step that need not wait for the device. On a GPU that is one step later.

Finding a part takes tens of milliseconds. With one rank a process does it while the canvas waits.
Several ranks must take the same steps, so each finds the part at once, and all requests wait.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from canvas_grammar import CompiledConstraint
from canvas_grammar.decoding import (
    START,
    CanvasWindow,
    ConstrainedPath,
    DistantSession,
    Explorer,
    FreeTokens,
    Part,
    PathStep,
    PlannedCanvas,
    Session,
    path_finder,
)
from vllm.logger import init_logger

from vllm_dllm.decoding.blocks import open_blocks
from vllm_dllm.engine.contracts import FollowedPaths, MaskedRows, StepPlan
from vllm_dllm.engine.slots import SlotState
from vllm_dllm.engine.to_device import can_pin, to_device
from vllm_dllm.ops.statistics.rows import EntropyStatistics, SampledStatistics
from vllm_dllm.ops.statistics.sampled import draw_and_sum, with_drawn
from vllm_dllm.vllm_seams.channels import Failure

logger = init_logger("vllm.dllm")

# How many plans are cached. A steady batch has one for each part that the readout splits it into,
# and for each part whose paths are found together: these take this much memory for that.
MOST_KEPT, MOST_BYTES_AT_ONCE = 32, 256 << 20
# A CPU draws the tokens of this many rows at a time, which stay in its caches.
ROWS_AT_ONCE_CPU = 4
# How much memory constraints that no request follows may take until another request does.
MOST_BYTES_UNUSED = 256 << 20
# Stands for a temperature of 0, by which nothing can be divided.
COLDEST = 1e-30


class Constraints:
    """The constraint of each slot (on the host) and its state (on the device).

    A canvas follows a part of its constraint that begins in the state before the canvas; see
    `canvas_grammar.automaton.windows`.
    """

    def __init__(self, slots: SlotState, alone: bool = False) -> None:
        """`alone` says that there is only one rank."""
        count, device = len(slots.phase), slots.device
        self.slots = slots
        # [slots], the state in the slot's part after the tokens output so far, and after the
        # finished blocks of a canvas of several.
        self.state = torch.zeros(count, dtype=torch.int64, device=device)
        # By slot, the constraint of its request, which slots with equal constraints share; the part
        # that its canvas follows, once it is known; the hash of the packed constraint and the
        # tokens of a canvas; the part that is being found for it.
        self.sessions: dict[int, Any] = {}
        self.parts: dict[int, Part] = {}
        self._keys: dict[int, tuple[bytes, int]] = {}
        self._finding: dict[int, Future[Any]] = {}
        # By key, those that no slot follows, with their bytes; the longest unused one is first.
        self._unused: dict[tuple[bytes, int], tuple[Any, int]] = {}
        self._explorer = Explorer() if alone else None
        self.starts = CanvasStarts(count, device)
        self.finder = path_finder(device)  # with memory that all steps share
        self._plan = lru_cache(MOST_KEPT)(self._planned)

    def enter(self, slot: int, packed: bytes, output: Sequence[int], blocks: int = 1) -> None:
        """Set up ``slot`` for a request whose next canvas is a new one.

        `output` are the tokens that it had output before it was preempted, and `blocks` says how
        many unfinished blocks of its canvases may be open.
        """
        self.leave(slot)
        self.slots.constrained[slot] = True
        kind = self.slots.kind
        length = kind.block_length if blocks == 1 else kind.length
        key = hashlib.sha256(packed).digest(), length
        same = (self.sessions[each] for each, known in self._keys.items() if known == key)
        session, _ = self._unused.pop(key, (next(same, None), 0))
        if self._explorer is None:
            session = session or Session(CompiledConstraint(packed), length, self.slots.device)
        elif session is None or session.ended:
            session = DistantSession(self._explorer, packed, length, self.slots.device)
        self.sessions[slot], self._keys[slot] = session, key
        self._find(slot, START, output)

    def resume(self, slot: int, output: Sequence[int], before: int) -> None:
        """Give ``slot`` the part of a canvas that has already begun.

        `output` are all tokens of the request, `before` of them from before the canvas began.
        """
        self._find(slot, START, output[:before], output[before:])
        if slot in self._finding:  # it may be about to commit, which cannot wait
            self._receive(slot)

    def _find(self, slot: int, *asked: Any) -> None:
        """Give the canvas of ``slot`` its part, or let it wait; `asked` as for `Session.find`."""
        self._finding.pop(slot, None)
        found = self.sessions[slot].find(*asked)
        if isinstance(found, Future):
            self._finding[slot] = found
            self.starts.enter(slot, moves=True, waits=True)
        else:
            self._follow(slot, *found)

    def _receive(self, slot: int) -> None:
        self._follow(slot, *self.sessions[slot].received(self._finding.pop(slot).result()))

    def _follow(self, slot: int, part: Part, place: int) -> None:
        self.parts[slot] = part
        self.state[slot].fill_(place)
        self.starts.enter(slot, moves=not part.whole)

    def _begin_canvases(self, on_host: Sequence[int] = ()) -> None:
        """Give canvases that have begun the nearby part of their constraints.

        If no other canvas is in the batch `on_host`, wait until one of them can go on.
        """
        for slot, place in self.starts.begun():
            if slot not in self._finding:
                self._find(slot, self.parts[slot].state(place))
        if on_host and all(slot in self._finding for slot in on_host):
            wait([self._finding[slot] for slot in on_host], return_when=FIRST_COMPLETED)
        for slot in [slot for slot, found in self._finding.items() if found.done()]:
            try:
                self._receive(slot)
            except Exception:
                logger.exception("dllm: a request ends, its constraint was not followed")
                self.slots.failure[slot].fill_(int(Failure.NOT_TAKEN_UP))
                self.starts.enter(slot, moves=False)

    def leave(self, slot: int) -> None:
        """Free ``slot``; its constraint is kept for other requests, see `MOST_BYTES_UNUSED`."""
        self.slots.constrained[slot] = False
        self.starts.leave(slot)
        self.parts.pop(slot, None)
        self._finding.pop(slot, None)
        key, session = self._keys.pop(slot, None), self.sessions.pop(slot, None)
        if key is None or session is None or session in self.sessions.values():
            return
        self._plan.cache_clear()
        self._unused[key] = session, session.nbytes
        while sum(size for _, size in self._unused.values()) > MOST_BYTES_UNUSED:
            del self._unused[next(iter(self._unused))]

    def begin_step(self, plan: StepPlan, revises: torch.Tensor) -> ConstrainedStep:
        """Return what the canvases of a step must follow.

        `revises` (bool ``[n]``) are canvases whose visible tokens may change in this step.
        """
        self._begin_canvases(plan.on_host.tolist())
        now, before = plan.status, plan.status.canvas
        stays = torch.where(revises[:, None], before.fixed, ~before.masked)
        first, width = now.tail.contiguous(), torch.zeros_like(now.tail) + plan.width
        budget, kind = now.remaining.contiguous(), self.slots.kind
        if kind.blocks > 1:
            first = torch.maximum(first, self.slots.finished_end(plan.slots))
            budget = (budget + now.tail - first).clamp_min(0)
            # What the model would write in a block that is not open says nothing yet, so the path
            # ends before it, unless a part of a constraint might leave no path for that block.
            masked = before.masked.unflatten(1, (kind.blocks, -1))
            opened, _ = open_blocks(masked, now.blocks, kind.opens_at)
            cut = (now.blocks == 1) | ~self.starts.moving.index_select(0, plan.slots)
            end = torch.where(cut, opened.sum(1) * kind.block_length, kind.length)
            width = torch.minimum(width, end)
        window = CanvasWindow(
            state=self.state.index_select(0, plan.slots),
            first=first,
            budget=budget,
            width=width,
            forced=torch.where(stays, before.tokens, -1),
        )
        waits = self.starts.waits(plan.slots, plan.on_host)
        return ConstrainedStep(self, plan.slots, window, ConstrainedPath.empty(window), waits)

    def plan(self, on_host: np.ndarray, where: np.ndarray, both: bool) -> Followed:
        """Plan the path searches for the canvases `where` (int ``[m]``) of a batch; cached.

        With `both`, canvases that draw have a best path, too.
        """
        canvases = []
        for index, slot in zip(where.tolist(), on_host[where].tolist(), strict=True):
            draws = bool(self.slots.samples[slot])
            canvases.append((index, self.parts[slot], self.sessions[slot], draws))
        return self._plan(len(on_host), both, *canvases)

    def known(self, on_host: np.ndarray) -> np.ndarray:
        """The constrained canvases of a batch, but for those that have no part yet, int ``[m]``."""
        where = np.flatnonzero(self.slots.constrained[on_host])
        return where[[slot in self.parts for slot in on_host[where].tolist()]]

    def _planned(self, count: int, both: bool, *canvases: tuple[int, Part, Any, bool]) -> Followed:
        planned = [
            PlannedCanvas(index, part.automaton, session.classes, both or not draws, draws)
            for index, part, session, draws in canvases
        ]
        kinds: np.ndarray = np.zeros((2, count, 1), dtype=bool)
        for canvas in planned:
            kinds[:, canvas.index] = [[True], [canvas.draws]]
        follows, draws = to_device(kinds, self.slots.device)
        greedy = sum(not canvas.draws for canvas in planned)
        return Followed(self.finder.plan(planned), len(planned), greedy, follows, draws)


@dataclass(frozen=True)
class ConstrainedStep:
    """The constraints of a step's canvases, those without a constraint among them."""

    constraints: Constraints
    slots: torch.Tensor  # int64 [n], the slots of the batch
    # The canvases as their constraints see them: which tokens are fixed, and which may change.
    window: CanvasWindow
    path: ConstrainedPath  # the paths of constrained canvases, written when they are chosen
    waits: torch.Tensor | None  # see `FollowedPaths`

    def part(self, rows: slice) -> ConstrainedStep:
        """The constraint of a slice of the canvases; its chosen paths are stored in the whole."""
        waits = None if self.waits is None else self.waits[rows]
        window, path = self.window.part(rows), self.path.part(rows)
        return ConstrainedStep(self.constraints, self.slots[rows], window, path, waits)

    def choose_paths(self, rows: MaskedRows, plan: StepPlan) -> None:
        """Replace a masked model's tokens and their confidences with those of paths, in place.

        A most probable path's token has its probability; a drawn one's comes from `with_drawn`,
        with `StepPlan.own_confidence` or `MaskedRows.share`. Positions after the end of the text
        have confidence 1.
        """
        where = self.constraints.known(plan.on_host)
        if not len(where):
            return
        # Those that draw come last, because their logits are others.
        samples = self.constraints.slots.samples[plan.on_host[where]]
        where = where[np.argsort(samples, kind="stable")]
        followed, own = self.constraints.plan(plan.on_host, where, False), plan.own_confidence
        shape = self.window.forced.shape
        greedy, statistics = rows.greedy.view(*shape), rows.statistics.view(*shape)
        draws, path = followed.count > followed.greedy, self.path
        free = FreeTokens(greedy.token)
        if draws:
            free = self._drawn_freely(rows, greedy.token, followed)
        step = PathStep(followed.plan, self.window, free, path)
        finder = self.constraints.finder

        def own_rows(logits: torch.Tensor) -> torch.Tensor:
            return logits.view(*shape, -1) if rows.place is None else logits

        if followed.greedy:
            finder.read(step, range(followed.greedy), own_rows(rows.logits), place=rows.place)
        if draws:
            assert rows.filtered is not None and rows.tempered is not None
            kept, exact = own_rows(rows.filtered), own_rows(rows.tempered)
            drawn_ones = range(followed.greedy, followed.count)
            finder.read(step, drawn_ones, kept, exact, rows.place)
        finder.follow(step)
        sure = path.probability(greedy.probability)
        if draws:
            own = None if own is None else own[:, None]
            share = None if rows.share is None else rows.share.view(*shape)
            weight = path.margin.exp()
            sampled = with_drawn(greedy, weight, path.inside, path.token, own, share)
            of_drawn = torch.where(path.inside, sampled.probability, 1.0)
            sure = torch.where(followed.draws, of_drawn, sure)
        changed = replace(
            statistics,
            token=torch.where(followed.follows, path.token, statistics.token),
            probability=torch.where(followed.follows, sure, statistics.probability),
        )
        if isinstance(changed, EntropyStatistics):
            outside = followed.follows & ~path.inside
            changed.entropy = changed.entropy.masked_fill(outside, 0.0)
        rows.statistics = changed.view(-1)

    def _drawn_freely(
        self, rows: MaskedRows, likeliest: torch.Tensor, followed: Followed
    ) -> FreeTokens:
        """Return the tokens that the drawing canvases would get without a constraint."""
        keys, kept = rows.keys, rows.filtered
        assert keys is not None and kept is not None
        if keys.device.type != "cpu":
            from vllm_dllm.ops.statistics.rows_triton import logits_statistics
            from vllm_dllm.ops.statistics.scores_triton import LogitRows

            found = logits_statistics(LogitRows(kept, keys.shape[1]), keys=keys.flatten())
            share = found.greedy_statistics(entropy=False).probability.view(keys.shape)
            return FreeTokens(likeliest, found.sample.view(keys.shape), share, keys)
        token, total = torch.zeros_like(keys), torch.zeros(keys.shape)
        top = torch.zeros(keys.shape)
        wanted = (self.window.wanted() & followed.draws).flatten().nonzero()[:, 0]
        own = wanted if rows.place is None else rows.place.flatten()[wanted]
        for first, end in _runs(own.numpy(), ROWS_AT_ONCE_CPU):
            some, at = slice(int(own[first]), int(own[end - 1]) + 1), wanted[first:end]
            drawn = draw_and_sum(kept[some], keys.flatten()[at])
            token.view(-1)[at], total.view(-1)[at] = drawn
        top.view(-1)[wanted] = kept[own, likeliest.flatten()[wanted]]
        return FreeTokens(likeliest, token, (top - total).exp(), keys)

    def choose_noise_paths(
        self,
        own: SampledStatistics,
        plan: StepPlan,
        keys: torch.Tensor,
        logits: Callable[[int, int], torch.Tensor],
        at_once: int,
    ) -> SampledStatistics:
        """A uniform-noise model's statistics with the tokens of best paths and of drawn paths.

        Entropies remain those of the model, and are 0 after the budget. After the end of a path's
        text a canvas keeps what the model writes there (DiffusionGemma does not repeat
        end-of-sequence tokens), because it is read again.

        Args:
            own: the statistics of the whole batch, ``[n, L]``.
            plan: the plan of the batch.
            keys: int64 ``[n, L]``, the keys of the random numbers.
            logits: computes the logits ``[canvases, L, ids]`` of a range of canvases.
            at_once: the most canvases whose logits may exist at a time.
        """
        where = self.constraints.known(plan.on_host)
        if not len(where):
            return own
        followed = self.constraints.plan(plan.on_host, where, True)
        finder = self.constraints.finder
        draws = followed.count > followed.greedy
        free = FreeTokens(own.token, own.sample, own.probability, keys, plan.temperature)
        second = self.path.like() if draws else None
        parts = (
            1 + finder.nbytes(followed.plan, self.constraints.slots.length) // MOST_BYTES_AT_ONCE
        )
        for some in np.array_split(where, min(parts, len(where))):
            plan_of_some = self.constraints.plan(plan.on_host, some, True).plan
            step = PathStep(plan_of_some, self.window, free, self.path, second)
            for first, end in _runs(some, at_once):
                canvases = logits(int(some[first]), int(some[end - 1]) + 1)
                finder.read(step, range(first, end), canvases)
                del canvases  # the rows of some canvases at a time
            finder.follow(step)
        # At temperature 0 the likeliest token is certain, and no other one is possible.
        rate = plan.temperature.clamp_min(COLDEST).reciprocal()[:, None]

        def kept(
            path: ConstrainedPath, follows: torch.Tensor, token: torch.Tensor, known: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            sure = (path.margin * rate).exp() * own.probability
            follows = follows & ~path.after_end
            return torch.where(follows, path.token, token), torch.where(follows, sure, known)

        token, probability = kept(self.path, followed.follows, own.token, own.probability)
        sample, its_probability = own.sample, own.sample_probability
        if followed.greedy:
            greedy = followed.follows & ~followed.draws
            sample, its_probability = kept(self.path, greedy, sample, its_probability)
        if second is not None:
            sample, its_probability = kept(second, followed.draws, sample, its_probability)
        outside = followed.follows & ~self.path.inside
        entropy = own.entropy.masked_fill(outside, 0.0)
        return SampledStatistics(token, probability, sample, its_probability, entropy)

    def followed(self) -> FollowedPaths:
        """The chosen paths through the canvases of the batch."""
        path = self.path
        return FollowedPaths(path.token, path.inside, path.feasible, self.waits)

    def advance(self, out: torch.Tensor, leaves: torch.Tensor) -> None:
        """Advance the constraints by what was output; arguments are those of `StepOutcome`."""
        state, slots = self.constraints.state, self.constraints.slots
        read, begun = out, leaves
        if slots.kind.blocks > 1:
            finished = slots.finished_end(self.slots)
            read = torch.where(leaves, out, torch.maximum(out, finished))
            # Where one block is open, the next one is to the constraint a canvas of its own.
            alone = slots.blocks.index_select(0, self.slots) == 1
            next_block = (finished > self.window.first) & (finished < slots.length)
            begun = leaves | (next_block & alone)
        # Where `read` has not grown, the state stays the same.
        state.index_copy_(0, self.slots, self.path.states.gather(1, read[:, None])[:, 0])
        self.constraints.starts.ask(state, self.slots, begun)
        if not self.constraints.starts.late:
            self.constraints._begin_canvases()


@dataclass(frozen=True)
class Followed:
    """Some canvases of a batch, and what they must follow."""

    plan: Any  # the finder's
    count: int  # how many canvases these are
    greedy: int  # how many of them do not draw
    follows: torch.Tensor  # bool [n, 1], which canvases these are
    draws: torch.Tensor  # bool [n, 1], which of them draw


def _runs(where: np.ndarray, most: int) -> Iterator[tuple[int, int]]:
    """Ranges of `where` (ascending numbers) that are adjacent numbers, at most `most` of them."""
    first = 0
    for end in range(1, len(where) + 1):
        if end == len(where) or end - first == most or where[end] != where[end - 1] + 1:
            yield first, end
            first = end


class _Copy:
    """A buffer on the host for one copy from the device."""

    def __init__(self, slots: int, device: torch.device) -> None:
        pinned = can_pin(device)
        self.tensor = torch.zeros((2, slots), dtype=torch.int64, pin_memory=pinned)
        # Marks a copy as complete; None where copying is synchronous.
        self.event = torch.Event(device) if pinned else None

    @cached_property
    def array(self) -> np.ndarray:
        return self.tensor.numpy()

    def take(self, values: torch.Tensor) -> None:
        self.tensor.copy_(values, non_blocking=True)
        if self.event is not None:
            self.event.record()

    def read(self) -> np.ndarray:
        """Return the copied values, waiting for the copy if necessary."""
        if self.event is not None:
            self.event.synchronize()
        return self.array


class CanvasStarts:
    """Tracks canvases that have begun and wait for the part of the constraint that they follow."""

    def __init__(self, slots: int, device: torch.device, late: int | None = None) -> None:
        # How many steps pass between a copy and its use, 0 or 1.
        self.late = int(can_pin(device)) if late is None else late
        self.waiting = torch.zeros(slots, dtype=torch.bool, device=device)
        # Constraints that are larger than a part, on the device and on the host.
        self.moving = torch.zeros_like(self.waiting)
        self._moves: np.ndarray = np.zeros(slots, dtype=bool)
        # Copies are numbered; those before a slot's request or last answer do not count for it.
        self._first: np.ndarray = np.zeros(slots, dtype=np.int64)
        self._next = 0
        self._free = [_Copy(slots, device) for _ in range(self.late + 1)]
        self._in_flight: list[tuple[int, _Copy]] = []

    def enter(self, slot: int, moves: bool, waits: bool = False) -> None:
        """Set up ``slot`` for a canvas that has its part, or waits for it until the next call.

        `moves` says that the next canvas may need another part.
        """
        self._moves[slot], self._first[slot] = moves, self._next
        self.moving[slot].fill_(moves)
        self.waiting[slot].fill_(waits)

    def leave(self, slot: int) -> None:
        """Stop expecting canvases of ``slot``, whose next request may have no constraint."""
        if self._moves[slot]:
            self.enter(slot, moves=False)

    def waits(self, slots: torch.Tensor, on_host: np.ndarray) -> torch.Tensor | None:
        """Which canvases of these slots have no answer yet, bool ``[n]``; None if none can wait."""
        if not self._moves[on_host].any():
            return None
        return self.waiting.index_select(0, slots)

    def ask(self, states: torch.Tensor, slots: torch.Tensor, leaves: torch.Tensor) -> None:
        """Let the canvases after those that leave (bool ``[n]``) wait, and start the copy.

        `states` are those of all slots, int64, and `slots` those of the batch, int64 ``[n]``.
        """
        if not self._moves.any():
            return
        begun = leaves & self.moving.index_select(0, slots)
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
