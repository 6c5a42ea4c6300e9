"""One decoding update of a batch of canvases, and what becomes of each of them.

Algorithms say what a canvas looks like next and whether they have finished with it; here that
becomes a phase: go on, wait (execution mode ``sync``), commit, or leave. All of it is tensor
operations on all canvases at once; the only loop is over the algorithms that share the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from vllm_dllm.constraints.decoding.best_path import CanvasWindow
from vllm_dllm.constraints.decoding.constrained_step import tokens_kept_to_path
from vllm_dllm.decoding import Canvas, StepContext, Update, emitted_length
from vllm_dllm.decoding.completion import decided_prefix, first_end
from vllm_dllm.worker.algorithm_state import Group
from vllm_dllm.worker.plan import Outcome, Plan, Policy
from vllm_dllm.worker.readout_ways import Rows, Wanted
from vllm_dllm.worker.slots import Phase, SlotState, Standing


class Decoder:
    """Runs the algorithms of a batch and applies the `Policy`."""

    def __init__(self, slots: SlotState, policy: Policy) -> None:
        self.slots = slots
        self.policy = policy

    def plan(
        self, before: Canvas, slots: torch.Tensor, on_host: np.ndarray, width: torch.Tensor | int
    ) -> Plan:
        """Who decodes what, and what the statistics must contain."""
        standing = self.slots.standing(slots)
        groups = self.slots.groups(slots, on_host, before)
        temperatures, adjusts, asks, entropy = [], [], [], False
        for group in groups:
            algorithm = group.bank.algorithm
            progress = group.take(standing.step), group.take(standing.schedule_steps)
            of_request = group.take(standing.temperature)
            temperatures.append(algorithm.temperature(of_request, progress, group.parameters))
            adjusts.append(algorithm.adjust(group.canvas, group.parameters))
            asks.append(algorithm.ask(group.state))
            entropy |= algorithm.reads_entropy
        ids = _spread([a and a[0] for a in adjusts], groups, len(slots))
        amounts = _spread([a and a[1] for a in adjusts], groups, len(slots))
        wanted = Wanted(
            slots,
            on_host,
            width,
            _spread(temperatures, groups, len(slots)),
            adjust=None if ids is None or amounts is None else (ids, amounts),
            ask=_spread(asks, groups, len(slots)),
            entropy=entropy,
        )
        plan = Plan(before, standing, groups, wanted)
        if self.slots.constraints.asked(on_host):
            plan = replace(plan, wanted=replace(wanted, window=self._window(plan)))
        return plan

    def _window(self, plan: Plan) -> CanvasWindow:
        """What constraints see of the canvases: tokens that stay, and room for others."""
        now, before = plan.standing, plan.before
        revises = self._edited(plan) & ~self._rests(now)
        return CanvasWindow(
            state=self.slots.constraints.state.index_select(0, plan.wanted.slots),
            first=now.tail,
            budget=now.remaining,
            width=torch.zeros_like(now.tail) + plan.wanted.width,
            forced=torch.where(
                torch.where(revises[:, None], before.fixed, ~before.masked), before.tokens, -1
            ),
        )

    def _edited(self, plan: Plan) -> torch.Tensor:
        """Canvases whose visible tokens may change until they are done, bool ``[n]``."""
        edited = torch.zeros_like(plan.standing.read_only)
        for group in plan.groups:
            if group.bank.algorithm.edits:
                edited[slice(None) if group.index is None else group.index] = True
        return edited

    def _rests(self, now: Standing) -> torch.Tensor:
        """Canvases that this pass does not denoise: they commit, or wait for others."""
        return now.ready > 0 if self.policy.sync else now.phase == int(Phase.COMMIT)

    def decide(self, plan: Plan, rows: Rows, present: torch.Tensor | None) -> Outcome:
        """Run the algorithms, and settle what becomes of each canvas.

        `present` is as in `StepContext`.
        """
        now, sync = plan.standing, self.policy.sync
        commits, rests = now.phase == int(Phase.COMMIT), self._rests(now)
        updates = [self._update(group, plan, rows, present) for group in plan.groups]
        canvas, done = _merged(plan, updates)
        if rows.path is not None and self.slots.kind.mask_token is not None:
            fixed = canvas.fixed | rests[:, None]
            tokens = tokens_kept_to_path(canvas.tokens, canvas.masked, rows.path, fixed)
            canvas = replace(canvas, tokens=tokens)
        if sync:
            canvas, done = _where(rests, plan.before, canvas), done | rests
        limit = (now.tail + now.remaining).clamp_min(1)
        reach = torch.minimum(first_end(canvas, now.end_tokens), limit)
        ready = self._ready(plan, canvas, done, reach)
        settled = ready > 0
        if sync:
            settled = settled & settled.all()
        written = self._needs_no_commit(plan, canvas, reach <= ready)
        leaves = commits | (settled if self.policy.fused else settled & written)
        out = torch.where(
            leaves,
            torch.where(commits, now.ready, ready),
            self._streamed(plan, canvas, settled, limit),
        )
        return Outcome(
            canvas=canvas,
            state=[update.state for update in updates],
            ready=ready,
            commits=commits,
            rests=rests,
            settled=settled,
            leaves=leaves,
            unwritten=leaves & ~(commits | written),
            out=out,
            path=rows.path,
            fresh=rows.fresh,
        )

    def decided(self, plan: Plan, outcome: Outcome) -> torch.Tensor:
        """Bool ``[n, L]``, the positions whose token was chosen in this step."""
        before, after = plan.before, outcome.canvas
        if self.slots.kind.mask_token is None:
            chosen = torch.ones_like(after.masked)  # every step predicts the whole canvas
        else:
            chosen = (after.tokens != before.tokens) | (before.masked & ~after.masked)
        return chosen & ~outcome.rests[:, None]

    def keep(self, plan: Plan, outcome: Outcome) -> torch.Tensor:
        """Write the outcome into the slots; returns int64 ``[n, L]``, what the model reads next."""
        state, now, slots, leaves = self.slots, plan.standing, plan.wanted.slots, outcome.leaves
        for group, new in zip(plan.groups, outcome.state, strict=True):
            group.bank.keep(group.slots, new, group.take(leaves))
        phase = torch.where(outcome.settled & ~leaves, int(Phase.COMMIT), int(Phase.DENOISE))
        state.phase.index_copy_(0, slots, phase.to(torch.int8))
        state.remaining.index_add_(0, slots, now.tail - outcome.out)
        state.tail.index_copy_(0, slots, outcome.out.masked_fill(leaves, 0))
        state.ready.index_copy_(0, slots, outcome.ready.masked_fill(leaves, 0))
        state.step.index_copy_(0, slots, (now.step + 1).masked_fill(leaves, 0))
        if outcome.path is not None:
            state.constraints.advance(slots, outcome.path, outcome.out)
        width, fresh = plan.wanted.width, outcome.fresh
        return state.advance(slots, outcome.canvas, leaves, width, fresh)

    def _update(self, group: Group, plan: Plan, rows: Rows, present: torch.Tensor | None) -> Update:
        now, index = plan.standing, group.index
        step = group.take(now.step)
        return group.bank.algorithm.step(
            group.canvas,
            StepContext(
                statistics=rows.statistics if index is None else rows.statistics.take(index),
                last=step + 1 >= group.take(now.max_steps),
                parameters=group.parameters,
                state=group.state,
                step=step,
                noise=group.take(rows.noise),
                present=group.take(present),
                asked=group.take(rows.asked),
            ),
        )

    def _ready(
        self, plan: Plan, canvas: Canvas, done: torch.Tensor, reach: torch.Tensor
    ) -> torch.Tensor:
        """The prefix that may leave, int64 ``[n]``: all of an edited canvas, once it is `done`."""
        width = plan.wanted.width
        edits = [group.bank.algorithm.edits for group in plan.groups]
        if all(edits):
            return torch.where(done, width, 0)
        ready = emitted_length(canvas, reach, self.policy.early)
        if any(edits):
            ready = torch.where(self._edited(plan), torch.where(done, width, 0), ready)
        return ready

    def _needs_no_commit(self, plan: Plan, canvas: Canvas, is_last: torch.Tensor) -> torch.Tensor:
        """Canvases that need no (further) forward pass over their final tokens, bool ``[n]``.

        The request ends in those of ``is_last``.
        """
        needless = plan.standing.read_only
        if self.policy.skip_last_commit:
            needless = needless | is_last
        if self.policy.in_place:
            unread = (canvas.tokens != plan.before.tokens) | canvas.masked
            needless = needless | ~unread.any(1)
        return needless

    def _streamed(
        self, plan: Plan, canvas: Canvas, settled: torch.Tensor, limit: torch.Tensor
    ) -> torch.Tensor:
        """The prefix that is out while a canvas stays, int64 ``[n]``.

        It is what was out before, or with `stream_prefix` what is decided by now.
        """
        state, wanted, tail = self.slots, plan.wanted, plan.standing.tail
        if state.kind.mask_token is None or not state.streams[wanted.on_host].any():
            return tail
        sends = state.stream_prefix.index_select(0, wanted.slots) & ~settled
        # The last position leaves with its canvas. vLLM counts what is out as computed, and would
        # share a page that is out as a whole before its keys and values are final.
        decided = decided_prefix(canvas).clamp_max(state.length - 1)
        return torch.where(sends, torch.minimum(decided, limit), tail)


def _merged(plan: Plan, updates: list[Update]) -> tuple[Canvas, torch.Tensor]:
    """The groups' canvases, and whether they are done, in batch order."""
    if len(updates) == 1:
        return updates[0].canvas, updates[0].done
    tokens, masked, done = (
        _spread(parts, plan.groups, len(plan.wanted.slots))
        for parts in (
            [update.canvas.tokens for update in updates],
            [update.canvas.masked for update in updates],
            [update.done for update in updates],
        )
    )
    return Canvas(tokens, masked, plan.before.fixed), done


def _where(old: torch.Tensor, before: Canvas, after: Canvas) -> Canvas:
    """``before`` where true in ``old`` (bool ``[n]``)."""
    keep = old[:, None]
    return Canvas(
        torch.where(keep, before.tokens, after.tokens),
        torch.where(keep, before.masked, after.masked),
        after.fixed,
    )


def _spread(
    parts: Sequence[torch.Tensor | None], groups: Sequence[Group], count: int
) -> torch.Tensor | None:
    """Groups' rows in batch order, 0 for groups that have none; None when no group has any."""
    given = next((part for part in parts if part is not None), None)
    if given is None or groups[0].index is None:
        return given
    whole = given.new_zeros((count, *given.shape[1:]))
    for part, group in zip(parts, groups, strict=True):
        if part is not None and group.index is not None:
            whole.index_copy_(0, group.index, part)
    return whole
