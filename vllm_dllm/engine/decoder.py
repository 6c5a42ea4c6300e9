"""One decoding update of a batch of canvases, and what becomes of each of them.

Algorithms say what a canvas looks like next and whether they have finished with it; here that
becomes a phase: go on, wait (execution mode ``sync``), commit, or leave. All of it is tensor
operations on all canvases at once; the only loop is over the algorithms that share the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from vllm_dllm.decoding import Canvas, StepContext, Update, emitted_length
from vllm_dllm.decoding.completion import first_end
from vllm_dllm.engine.requests import Bank, Phase, SlotState
from vllm_dllm.engine.statistics import Rows, Wanted


@dataclass(frozen=True)
class Policy:
    """When a canvas leaves.

    Attributes:
        sync: finished canvases wait for all others of the batch.
        early: see `emitted_length`.
        skip_last_commit: a request's last canvas leaves without a commit.
        in_place: a denoise pass over a final canvas is as good as a commit: the model reads both
            with the same mask and the same input.
    """

    sync: bool
    early: bool
    skip_last_commit: bool
    in_place: bool


@dataclass(frozen=True)
class Plan:
    """The canvases before the update.

    Attributes:
        before: ``[n, L]``.
        groups: algorithms, and which canvases (int64 ``[m]``, None for all) are theirs.
        wanted: what they need of the model's output.
    """

    before: Canvas
    groups: list[tuple[Bank, torch.Tensor | None]]
    wanted: Wanted


@dataclass(frozen=True)
class Outcome:
    """The canvases after the update; bool ``[n]`` unless said otherwise.

    Attributes:
        canvas: ``[n, L]``.
        decided: bool ``[n, L]``, positions whose token was chosen in this step.
        state: of each group's algorithm.
        ready: int64 ``[n]``, the prefix that may leave, 0 while the canvas goes on.
        commits: this pass was the canvas' commit, so what was read leaves.
        emitted: int64 ``[n]``, the prefix that leaves, where `leaves`.
        leaves: a prefix leaves now, and with it the canvas.
        streamed: int64 ``[n]``, the prefix that is out after this step, of those that stay.
        goes_on: the canvas is denoised further.
        released: a finished canvas need not wait for others.
    """

    canvas: Canvas
    decided: torch.Tensor
    state: list[Mapping[str, torch.Tensor]]
    ready: torch.Tensor
    commits: torch.Tensor
    emitted: torch.Tensor
    leaves: torch.Tensor
    streamed: torch.Tensor
    goes_on: torch.Tensor
    released: torch.Tensor


class Decoder:
    """Runs the algorithms of a batch and applies the `Policy`."""

    def __init__(self, slots: SlotState, policy: Policy) -> None:
        self.slots = slots
        self.policy = policy

    def plan(self, before: Canvas, slots: torch.Tensor, on_host: np.ndarray) -> Plan:
        """Who decodes what, and what the statistics must contain."""
        groups = self.slots.groups(on_host)
        adjusts, asks, entropy = [], [], False
        for bank, index in groups:
            algorithm, at = bank.algorithm, slots if index is None else slots[index]
            adjusts.append(algorithm.adjust(_take(before, index), _of(bank.parameters, at)))
            asks.append(algorithm.ask(_of(bank.state, at)))
            entropy |= algorithm.reads_entropy
        indices = [index for _, index in groups]
        ids = _spread([a and a[0] for a in adjusts], indices, len(slots))
        amounts = _spread([a and a[1] for a in adjusts], indices, len(slots))
        wanted = Wanted(
            slots,
            on_host,
            adjust=None if ids is None or amounts is None else (ids, amounts),
            ask=_spread(asks, indices, len(slots)),
            entropy=entropy,
        )
        return Plan(before, groups, wanted)

    def decide(
        self, plan: Plan, rows: Rows, present: torch.Tensor | None, width: torch.Tensor | int
    ) -> Outcome:
        """Run the algorithms, and settle what becomes of each canvas.

        `present` is as in `StepContext`, `width` the number of positions that exist.
        """
        state, slots, before = self.slots, plan.wanted.slots, plan.before
        commits = state.phase[slots] == Phase.COMMIT
        updates = [self._update(bank, index, plan, rows, present) for bank, index in plan.groups]
        canvas, done, edits = self._merged(plan, updates)
        waiting = (state.ready[slots] > 0) & ~commits
        if self.policy.sync:
            canvas = _where(waiting, before, canvas)
        ends = state.end_tokens[slots]
        limit = (state.tail[slots] + state.remaining[slots]).clamp_min(1)
        ready = emitted_length(canvas, ends, limit, self.policy.early)
        ready = torch.where(edits, torch.where(done, width, 0), ready)
        ready = torch.where(waiting, state.ready[slots], ready)
        decided = canvas.tokens != before.tokens
        finished = (ready > 0) | commits
        released = finished.all().expand_as(finished) if self.policy.sync else finished
        leaves = commits | (released & self._without_commit(canvas, decided, slots, ready, limit))
        if state.kind.mask_token is not None:
            decided = decided | (before.masked & ~canvas.masked)
        else:
            decided = torch.ones_like(decided)  # every step predicts the whole canvas
        goes_on = ~(leaves | (released & (ready > 0)))
        return Outcome(
            canvas=canvas,
            decided=decided & ~(commits | waiting)[:, None],
            state=[update.state for update in updates],
            ready=ready,
            commits=commits,
            emitted=torch.where(commits, state.ready[slots], ready),
            leaves=leaves,
            streamed=self._streamed(canvas, slots, goes_on, limit),
            goes_on=goes_on,
            released=released,
        )

    def keep(self, plan: Plan, outcome: Outcome, width: torch.Tensor | int) -> None:
        """Write the outcome into the slots."""
        state, slots, leaves = self.slots, plan.wanted.slots, outcome.leaves
        state.advance(slots, outcome.canvas)
        for (bank, index), new in zip(plan.groups, outcome.state, strict=True):
            at = slots if index is None else slots[index]
            for name, tensor in bank.state.items():
                tensor.index_copy_(0, at, new[name])
            bank.reset(at, leaves if index is None else leaves[index])
        out = torch.where(leaves, outcome.emitted, outcome.streamed)
        state.remaining.index_add_(0, slots, state.tail[slots] - out)
        state.tail.index_copy_(0, slots, outcome.streamed)
        state.renew(slots, leaves, width)
        state.ready.index_copy_(0, slots, outcome.ready * ~leaves)
        commit_next = outcome.released & (outcome.ready > 0) & ~leaves
        phase = torch.where(commit_next, int(Phase.COMMIT), int(Phase.DENOISE))
        state.phase.index_copy_(0, slots, phase.to(torch.int8))

    def _update(
        self,
        bank: Bank,
        index: torch.Tensor | None,
        plan: Plan,
        rows: Rows,
        present: torch.Tensor | None,
    ) -> Update:
        slots = plan.wanted.slots if index is None else plan.wanted.slots[index]

        def mine(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return tensor if tensor is None or index is None else tensor[index]

        step = self.slots.step[slots]
        return bank.algorithm.step(
            _take(plan.before, index),
            StepContext(
                statistics=rows.statistics if index is None else rows.statistics.take(index),
                last=step + 1 >= self.slots.max_steps[slots],
                parameters=_of(bank.parameters, slots),
                state=_of(bank.state, slots),
                step=step,
                noise=mine(rows.noise),
                present=mine(present),
                asked=mine(rows.asked),
            ),
        )

    def _merged(
        self, plan: Plan, updates: list[Update]
    ) -> tuple[Canvas, torch.Tensor, torch.Tensor]:
        """Canvas, done, and whether the algorithm edits, in batch order."""
        count = len(plan.wanted.slots)
        edits = [
            torch.full_like(update.done, bank.algorithm.edits)
            for (bank, _), update in zip(plan.groups, updates, strict=True)
        ]
        if plan.groups[0][1] is None:
            return updates[0].canvas, updates[0].done, edits[0]
        indices = [index for _, index in plan.groups]
        merged = [
            _spread(parts, indices, count)
            for parts in (
                [update.canvas.tokens for update in updates],
                [update.canvas.masked for update in updates],
                [update.done for update in updates],
                edits,
            )
        ]
        tokens, masked, done, edit = (part for part in merged if part is not None)
        return Canvas(tokens, masked, plan.before.fixed), done, edit

    def _streamed(
        self, canvas: Canvas, slots: torch.Tensor, goes_on: torch.Tensor, limit: torch.Tensor
    ) -> torch.Tensor:
        """The prefix that is out after this step: what was, or up to the first mask."""
        tail = self.slots.tail[slots]
        if self.slots.kind.mask_token is None:
            return tail
        prefix = (canvas.masked.cumsum(1) == 0).sum(1)
        sends = self.slots.stream_prefix[slots] & goes_on
        return torch.where(sends, torch.minimum(prefix, limit), tail)

    def _without_commit(
        self,
        canvas: Canvas,
        changed: torch.Tensor,
        slots: torch.Tensor,
        ready: torch.Tensor,
        limit: torch.Tensor,
    ) -> torch.Tensor:
        """Finished canvases that need no (further) forward pass over their final tokens."""
        needless = self.slots.read_only[slots]
        if self.policy.in_place:
            needless = needless | ~(changed.any(1) | canvas.masked.any(1))
        if self.policy.skip_last_commit:
            last = torch.minimum(first_end(canvas, self.slots.end_tokens[slots]), limit)
            needless = needless | (last <= ready)
        return needless & (ready > 0)


def _take(canvas: Canvas, index: torch.Tensor | None) -> Canvas:
    if index is None:
        return canvas
    return Canvas(canvas.tokens[index], canvas.masked[index], canvas.fixed[index])


def _where(old: torch.Tensor, before: Canvas, after: Canvas) -> Canvas:
    """``before`` where true in ``old`` (bool ``[n]``)."""
    keep = old[:, None]
    return Canvas(
        torch.where(keep, before.tokens, after.tokens),
        torch.where(keep, before.masked, after.masked),
        after.fixed,
    )


def _of(tensors: Mapping[str, torch.Tensor], slots: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: tensor[slots] for name, tensor in tensors.items()}


def _spread(
    parts: list[torch.Tensor | None], indices: list[torch.Tensor | None], count: int
) -> torch.Tensor | None:
    """Groups' rows in batch order, 0 for groups that have none; None when no group has any."""
    given = next((part for part in parts if part is not None), None)
    if given is None or indices[0] is None:
        return given
    whole = given.new_zeros((count, *given.shape[1:]))
    for part, index in zip(parts, indices, strict=True):
        if part is not None and index is not None:
            whole.index_copy_(0, index, part)
    return whole
