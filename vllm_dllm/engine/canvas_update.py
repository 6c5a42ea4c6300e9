"""One decoding update of a batch of canvases.

An algorithm computes the next canvas and whether it is done; the update turns this into what the
canvas does next: go on, wait (execution mode ``sync``), commit, or leave. All of this is tensor
operations on all canvases at once; the only loop is over the algorithms that share the batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_dllm.decoding import Canvas, StepContext, Update, emitted_length
from vllm_dllm.decoding.completion import decided_prefix, first_end
from vllm_dllm.engine.algorithm_state import (
    AlgorithmBatch,
    AlgorithmSlots,
    AlgorithmStates,
    adjustments,
    asked,
    own_at,
    temperatures,
)
from vllm_dllm.engine.canvas_parts import kept_where, merged, old_where
from vllm_dllm.engine.readout.contract import Readings, ReadRequest
from vllm_dllm.engine.slots import Phase, SlotState, Standing
from vllm_dllm.engine.step_plan import CommitPolicy, StepOutcome, StepPlan
from vllm_dllm.engine.to_device import to_device
from vllm_dllm.ops.compiled import compiled
from vllm_dllm.tracing.records import Told

if TYPE_CHECKING:
    from vllm_dllm.constraints.grammar import CanvasWindow

# Standing, canvases, the canvases by algorithm, and the temperatures of this step, float32 [n].
Batch = tuple[Standing, Canvas, list[AlgorithmBatch], torch.Tensor]


class CanvasUpdate:
    """Runs the algorithms of a batch and applies the `CommitPolicy`: plan, decide, keep."""

    def __init__(self, slots: SlotState, policy: CommitPolicy) -> None:
        self.slots = slots
        self.policy = policy

    def plan(
        self,
        slots: torch.Tensor,
        on_host: np.ndarray,
        width: torch.Tensor | int,
        compile: bool = False,
    ) -> StepPlan:
        """Group the canvases by algorithm, and find what must be read from the model's output.

        Args:
            slots: int64 ``[n]``, the slots of the batch.
            on_host: the same slots as a numpy array.
            width: number of positions of each canvas, int64 ``[n]``, or L for all of them.
            compile: read the slots' tensors by a compiled function; all canvases must share an
                algorithm.
        """
        state, read = self.slots, _read_batch_compiled if compile else _read_batch
        now, before, batches, temperature = read(state, slots, on_host)
        algorithms, draws = [each.all_slots for each in batches], bool(state.samples[on_host].any())
        request = ReadRequest(
            slots,
            on_host,
            width,
            draws=draws,
            needs_rows=bool(state.needs_rows[on_host].any()),
            adjust=adjustments(batches) if any(each.adjusts for each in algorithms) else None,
            ask=asked(batches) if any(each.asks for each in algorithms) else None,
            entropy=any(each.algorithm.reads_entropy for each in algorithms),
            temperature=temperature,
            may_go_on=not state.one_step[on_host].all(),
            own_at=own_at(batches, temperature) if draws else None,
            logprob=draws and bool(state.records[on_host].any()),
        )
        plan = StepPlan(before, now, batches, request)
        if state.constraints.followers and state.constraints.asked(on_host):
            state.constraints.begin_canvases()
            waits = state.constraints.starts.waits(slots, on_host)
            window = self._window(plan)
            plan = replace(plan, request=replace(request, window=window), waits=waits)
        return plan

    def _window(self, plan: StepPlan) -> CanvasWindow:
        """The canvases as constraints see them: which tokens stay, and which may still change."""
        from vllm_dllm.constraints.grammar import CanvasWindow

        now, before = plan.standing, plan.before
        revises = _edited(plan) & ~self._skips_denoise(now)
        return CanvasWindow(
            state=self.slots.constraints.state.index_select(0, plan.request.slots),
            first=now.tail,
            budget=now.remaining,
            width=torch.zeros_like(now.tail) + plan.request.width,
            forced=torch.where(
                torch.where(revises[:, None], before.fixed, ~before.masked), before.tokens, -1
            ),
        )

    def _skips_denoise(self, now: Standing) -> torch.Tensor:
        """Canvases that this pass does not denoise, because they commit or wait; bool ``[n]``."""
        return now.ready > 0 if self.policy.sync else now.phase == int(Phase.COMMIT)

    def decide(
        self, plan: StepPlan, readings: Readings, present: torch.Tensor | None
    ) -> StepOutcome:
        """Run the algorithms, and decide for each canvas whether it goes on, commits or leaves.

        `present` is as in `StepContext`.
        """
        now, sync = plan.standing, self.policy.sync
        commits = now.phase == int(Phase.COMMIT)
        # Without lockstep the two are the same, and one comparison serves for both.
        skips = self._skips_denoise(now) if sync else commits
        updates = [_step(batch, plan, readings, present) for batch in plan.batches]
        canvas, done = updates[0].canvas, updates[0].done
        if len(updates) > 1:
            canvas, done = merged(plan, updates)
        if readings.path is not None and self.slots.kind.mask_token is not None:
            fixed = canvas.fixed | skips[:, None]
            tokens = readings.path.keep(canvas.tokens, canvas.masked, fixed)
            canvas = replace(canvas, tokens=tokens)
        if sync:
            canvas, done = kept_where(skips, plan.before, canvas), done | skips
        if plan.waits is not None:
            canvas, done = kept_where(plan.waits, plan.before, canvas), done & ~plan.waits
            skips = skips | plan.waits
            # They follow a part of a constraint that is no longer theirs, to no effect.
            assert readings.path is not None
            readings.path.feasible.logical_or_(plan.waits)
        limit = (now.tail + now.remaining).clamp_min(1)
        reach = torch.minimum(first_end(canvas, now.end_tokens), limit)
        ready = self._ready(plan, canvas, done, reach)
        if plan.waits is not None:
            ready = ready.masked_fill(plan.waits, 0)
        ready_to_leave = (ready > 0) & (ready > 0).all() if sync else ready > 0
        written = self._needs_no_commit(plan, canvas, reach <= ready)
        leaves = commits | (ready_to_leave if self.policy.fused else ready_to_leave & written)
        streamed = self._streamed(plan, canvas, ready_to_leave, limit)
        told = torch.add(commits * -int(Told.COMMITTED), leaves, alpha=-int(Told.LEFT))
        if sync or plan.waits is not None:
            told = torch.add(told, skips, alpha=-int(Told.WAITED))
        kv_pending = torch.zeros_like(leaves)
        if self.policy.fused and not self.policy.two_blocks:
            kv_pending = leaves & ~(commits | written)
            told = torch.add(told, kv_pending, alpha=-int(Told.KV_PENDING))
        final = leaves | ready_to_leave
        return StepOutcome(
            canvas=canvas,
            shown=torch.where(commits[:, None], plan.before.tokens, canvas.tokens),
            state=[update.state for update in updates],
            ready=ready,
            commits=commits,
            skips_denoise=skips,
            ready_to_leave=ready_to_leave,
            leaves=leaves,
            kv_pending=kv_pending,
            told=told,
            goes_on=~(final if plan.waits is None else final | plan.waits),
            out=torch.where(leaves, torch.where(commits, now.ready, ready), streamed),
            path=readings.path,
            next_canvas=readings.next_canvas,
        )

    def decided(self, plan: StepPlan, outcome: StepOutcome) -> torch.Tensor:
        """The positions whose token was chosen in this step, bool ``[n, L]``."""
        before, after = plan.before, outcome.canvas
        if self.slots.kind.mask_token is None:
            chosen = torch.ones_like(after.masked)  # every step predicts the whole canvas
        else:
            chosen = (after.tokens != before.tokens) | before.masked
        return chosen & ~(after.masked | outcome.skips_denoise[:, None])

    def keep(self, plan: StepPlan, outcome: StepOutcome) -> torch.Tensor:
        """Write the outcome to the slots; returns the tokens to read next, int64 ``[n, L]``."""
        state, now, leaves = self.slots, plan.standing, outcome.leaves
        slots = plan.request.slots
        for batch, new in zip(plan.batches, outcome.state, strict=True):
            if batch.all_slots.algorithm.state:
                kept = new if plan.waits is None else old_where(plan.waits, batch, new)
                batch.all_slots.keep(batch.slots, kept, batch.rows(leaves))
        commits_next = outcome.ready_to_leave & ~leaves
        phase = torch.where(commits_next, int(Phase.COMMIT), int(Phase.DENOISE))
        state.phase.index_copy_(0, slots, phase.to(torch.int8))
        state.remaining.index_copy_(0, slots, now.remaining + now.tail - outcome.out)
        state.tail.index_copy_(0, slots, outcome.out.masked_fill(leaves, 0))
        state.ready.index_copy_(0, slots, outcome.ready.masked_fill(leaves, 0))
        step = now.step + 1
        if plan.waits is not None:
            step = torch.where(plan.waits, now.step, step)
        state.step.index_copy_(0, slots, step.masked_fill(leaves, 0))
        if outcome.path is not None:
            state.constraints.advance(slots, outcome.path, outcome.out, leaves)
        after, width = outcome.canvas, plan.request.width
        return state.advance(slots, after, leaves, width, outcome.next_canvas)

    def _ready(
        self, plan: StepPlan, canvas: Canvas, done: torch.Tensor, reach: torch.Tensor
    ) -> torch.Tensor:
        """Length of the prefix that may leave, int64 ``[n]``; edited canvases only leave whole."""
        width = plan.request.width
        edits = [batch.all_slots.algorithm.edits for batch in plan.batches]
        if all(edits):
            return torch.where(done, width, 0)
        ready = emitted_length(canvas, reach, self.policy.early)
        whole = self.slots.whole[plan.request.on_host]
        if self.policy.early and whole.any():
            waits = to_device(whole, canvas.tokens.device)
            ready = torch.where(waits, emitted_length(canvas, reach, early=False), ready)
        if any(edits):
            ready = torch.where(_edited(plan), torch.where(done, width, 0), ready)
        return ready

    def _needs_no_commit(
        self, plan: StepPlan, canvas: Canvas, is_last: torch.Tensor
    ) -> torch.Tensor:
        """Canvases that need no (further) forward pass over their final tokens, bool ``[n]``.

        ``is_last`` (bool ``[n]``) is true for canvases in which their request ends.
        """
        needless = plan.standing.read_only
        if self.policy.skip_last_commit:
            needless = needless | is_last
        if self.policy.in_place:
            unread = (canvas.tokens != plan.before.tokens) | canvas.masked
            needless = needless | ~unread.any(1)
        return needless

    def _streamed(
        self, plan: StepPlan, canvas: Canvas, ready_to_leave: torch.Tensor, limit: torch.Tensor
    ) -> torch.Tensor:
        """Length of the prefix that has been output while a canvas stays, int64 ``[n]``.

        It is unchanged, unless `stream_prefix` lets the prefix leave that is decided by now.
        """
        state, request, tail = self.slots, plan.request, plan.standing.tail
        if state.kind.mask_token is None or not state.streams[request.on_host].any():
            return tail
        sends = state.stream_prefix.index_select(0, request.slots) & ~ready_to_leave
        # The last position leaves with its canvas: vLLM counts tokens that are output as computed,
        # and would share a completely output page before its keys and values are final.
        decided = decided_prefix(canvas).clamp_max(state.length - 1)
        return torch.where(sends, torch.minimum(decided, limit), tail)


def _read_batch(state: SlotState, slots: torch.Tensor, on_host: np.ndarray) -> Batch:
    """Read the rows of a batch, of slots as in `CanvasUpdate.plan`."""
    now, before = state.read(slots)
    batches = state.algorithms.batches(slots, on_host, before)
    return now, before, batches, temperatures(batches, now)


def _read_batch_compiled(state: SlotState, slots: torch.Tensor, on_host: np.ndarray) -> Batch:
    """`_read_batch` in a few kernels, for canvases that share an algorithm."""
    all_slots = state.algorithms.for_slot(int(on_host[0]))
    now, before, parameters, own, temperature = compiled(read_rows)(state, all_slots, slots)
    batch = AlgorithmBatch(all_slots, None, slots, before, parameters, own)
    return now, before, [batch], temperature


def read_rows(
    state: SlotState, all_slots: AlgorithmSlots, slots: torch.Tensor
) -> tuple[Standing, Canvas, dict[str, torch.Tensor], dict[str, torch.Tensor], torch.Tensor]:
    """What `_read_batch_compiled` compiles: standing, canvases, parameters, state, temperatures."""
    now, before = state.read(slots)
    batch = AlgorithmStates.batch(all_slots, None, slots, before)
    return now, before, dict(batch.parameters), dict(batch.state), temperatures([batch], now)


def _edited(plan: StepPlan) -> torch.Tensor:
    """Canvases whose visible tokens may change until they are done, bool ``[n]``."""
    edited = torch.zeros_like(plan.standing.read_only)
    for batch in plan.batches:
        if batch.all_slots.algorithm.edits:
            batch.mark(edited)
    return edited


def _step(
    batch: AlgorithmBatch, plan: StepPlan, readings: Readings, present: torch.Tensor | None
) -> Update:
    """Run one step of an algorithm on its canvases."""
    now, index, statistics = plan.standing, batch.index, readings.statistics
    step = batch.rows(now.step)
    context = StepContext(
        statistics=statistics if index is None else statistics.take(index),
        last=step + 1 >= batch.rows(now.max_steps),
        parameters=batch.parameters,
        state=batch.state,
        step=step,
        noise=batch.rows(readings.noise),
        present=batch.rows(present),
        asked=batch.rows(readings.log_probabilities),
    )
    return batch.all_slots.algorithm.step(batch.canvas, context)
