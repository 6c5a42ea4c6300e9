"""One step over a batch of canvases: plan, decide, keep.

- `CanvasUpdate.plan` says what must be read from the model's output.
- `CanvasUpdate.decide` runs the algorithms. An algorithm computes the next canvas and whether it is
  done, which determines what the canvas does next: go on, wait, commit, or leave.
- `CanvasUpdate.keep` writes that to the slots.

All of this consists of tensor operations on all canvases at once; the only loops are over the
algorithms that share the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch

from vllm_dllm.decoding import Canvas, StepContext
from vllm_dllm.decoding.base import BlockLimits
from vllm_dllm.decoding.completion import decided_prefix, emitted_length, first_end
from vllm_dllm.engine.contracts import (
    Batch,
    CommitPolicy,
    FollowedPaths,
    Readings,
    StepOutcome,
    StepPlan,
)
from vllm_dllm.engine.optional_parts import OptionalParts
from vllm_dllm.engine.slots import AlgorithmBatch, Phase, SlotState, SlotStatus
from vllm_dllm.ops.compiled import CompiledOnce
from vllm_dllm.vllm_seams.channels import PassFlags

# So few logits take a CPU less time than the choice of rows.
FEW_LOGITS = 1 << 16

# A tensor ``[n, ...]``, a record of such tensors that has `take`, or None.
OfCanvases = TypeVar("OfCanvases")


class CanvasUpdate:
    """Runs the algorithms of a batch and applies the `CommitPolicy`: plan, decide, keep."""

    def __init__(self, slots: SlotState, policy: CommitPolicy, parts: OptionalParts) -> None:
        self.slots = slots
        self.policy = policy
        self.parts = parts
        # The algorithm whose canvases are updated by compiled functions, and whether these are
        # being compiled now; see `warm_up.compile_updates`.
        self.compiled_algorithm: str | None = None
        self.compiles_ahead = False
        self._compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}
        self._batch: tuple[Any, Batch] | None = None

    def batch(self, slots: torch.Tensor, on_host: np.ndarray) -> Batch:
        """These requests as a batch: that of the last call, if nothing has changed since.

        `slots` are integers ``[n or more]``, and `on_host` the first n as a numpy array.
        """
        key = on_host.tobytes(), self.slots.on_host[on_host].tobytes()
        if self._batch is None or self._batch[0] != key:
            # Copies, because vLLM may write the next batch to the same memory; its slots are int32.
            self._batch = key, self._as_batch(slots[: len(on_host)].long(), on_host.copy())
        return self._batch[1]

    def _as_batch(self, slots: torch.Tensor, on_host: np.ndarray) -> Batch:
        """Group the canvases by algorithm, and ask the algorithms what they need."""
        by_algorithm = self.slots.algorithms.batches(slots, on_host)
        algorithms = [part.algorithm for part in by_algorithm]
        flags = self.slots.asked(on_host)
        return Batch(
            slots,
            on_host,
            flags,
            by_algorithm,
            self.parts.observers(flags),
            entropy=any(algorithm.reads_entropy for algorithm in algorithms),
            likeliest=max(algorithm.likeliest for algorithm in algorithms),
            # Only a CPU need not wait to know which positions are masked.
            reads_masked=slots.device.type == "cpu"
            and len(slots) * self.slots.length * self.slots.kind.vocabulary >= FEW_LOGITS
            and not any(algorithm.reads_decided for algorithm in algorithms),
        )

    def plan(self, batch: Batch, width: torch.Tensor | int) -> StepPlan:
        """Determine what must be read from the model's output; `width` is that of `StepPlan`."""
        state, slots, every = self.slots, batch.slots, batch.by_algorithm
        compile = (
            len(every) == 1
            and every[0].algorithm.name == self.compiled_algorithm
            and not batch.observers
            and batch.verifies is None
            and isinstance(width, int)
        )
        if "temperature" in batch.overridden:
            temperature = self.compilable(_temperatures, compile)(state, batch)
        else:
            temperature = state.temperature.index_select(0, slots)
        plan = StepPlan(batch, state, width, temperature, compile=compile)
        if plan.draws and any(part.algorithm.own_confidence for part in every):
            plan.own_confidence = temperature * batch.having("own_confidence")
        if batch.reads_masked:
            plan.masked = state.masked.index_select(0, slots)
        if "ask" in batch.overridden:
            plan.ask = batch.in_order([part.algorithm.ask(part.state()) for part in every])
        if "adjust" in batch.overridden:
            plan.adjust = _adjustments(batch, plan.status.canvas)
        if batch.flags["constrained"]:
            may_revise = batch.having("edits") & ~self._finished(plan.status)
            plan.constraint = self.parts.constraints.begin_step(plan, may_revise)
        return plan

    def compilable(
        self, function: Callable[..., Any], compile: bool, kind: tuple[Any, ...] = ()
    ) -> Callable[..., Any]:
        """A function of a batch, or its compiled form for this kind of arguments, if there is one.

        Compiled forms are made only while `compiles_ahead` is true.
        """
        if not compile:
            return function
        key = function, *kind
        if self.compiles_ahead:
            self._compiled[key] = CompiledOnce(function)
        return self._compiled.get(key, function)

    def _finished(self, now: SlotStatus) -> torch.Tensor:
        """Canvases that were finished before this pass and commit or wait, bool ``[n]``."""
        return now.ready > 0 if self.policy.sync else now.phase == int(Phase.COMMIT)

    def decide(
        self,
        plan: StepPlan,
        now: SlotStatus,
        readings: Readings,
        present: torch.Tensor | None,
        paths: FollowedPaths | None = None,
    ) -> StepOutcome:
        """Run the algorithms, and decide for each canvas whether it goes on, commits or leaves.

        `now` has the columns of the plan's rows, `present` is as in `StepContext`, and `paths` is
        None if no canvas has a constraint.
        """
        policy = self.policy
        commits = now.phase == int(Phase.COMMIT)
        # Without lockstep a finished canvas commits at once, and one comparison is enough.
        skips = self._finished(now) if policy.sync else commits
        waits = None if paths is None else paths.waits
        if waits is not None:
            skips = skips | waits
        stays = skips if policy.sync else waits

        canvas, done, state = _denoised(plan, now, readings, present)
        if paths is not None and self.slots.kind.mask_token is not None:
            canvas = paths.kept(canvas, skips)
        if stays is not None:
            canvas = _kept_where(stays, now.canvas, canvas)

        limit = (now.tail + now.remaining).clamp_min(1)
        reach = torch.minimum(first_end(canvas, now.end_tokens), limit)
        ready = self._ready(plan, now, canvas, done, reach)
        if stays is not None:
            ready = torch.where(stays, now.ready, ready)

        ready_to_leave = (ready > 0) & (ready > 0).all() if policy.sync else ready > 0
        needs_no_commit = self._needs_no_commit(now, canvas, reach <= ready)
        if plan.batch.verifies is not None:
            needs_no_commit = needs_no_commit & ~plan.batch.verifies
        leaves = commits | (ready_to_leave if policy.fused else ready_to_leave & needs_no_commit)
        advances = leaves & (commits | needs_no_commit) if policy.granted else leaves
        streamed = self._streamed(plan, now, canvas, ready_to_leave, limit)
        return StepOutcome(
            canvas=canvas,
            shown=torch.where(commits[:, None], now.canvas.tokens, canvas.tokens),
            state=state,
            ready=ready,
            skips_denoise=skips,
            ready_to_leave=ready_to_leave,
            leaves=leaves,
            begins=leaves if waits is None else leaves | waits,
            advances=advances,
            flags=self._flags(commits, leaves, None if stays is None else skips, advances),
            out=torch.where(leaves, torch.where(commits, now.ready, ready), streamed),
        )

    def _flags(
        self,
        commits: torch.Tensor,
        leaves: torch.Tensor,
        skips: torch.Tensor | None,
        advances: torch.Tensor,
    ) -> torch.Tensor:
        """See `StepOutcome.flags`; `skips` is None if no canvas can be waiting."""
        flags = torch.add(commits * int(PassFlags.COMMITTED), leaves, alpha=int(PassFlags.LEFT))
        if skips is not None:
            flags = torch.add(flags, skips, alpha=int(PassFlags.WAITED))
        if self.policy.granted:
            flags = torch.add(flags, leaves & ~advances, alpha=int(PassFlags.KV_PENDING))
        return flags

    def decided(self, plan: StepPlan, outcome: StepOutcome) -> torch.Tensor:
        """The positions whose token was chosen in this step, bool ``[n, L]``."""
        before, after = plan.status.canvas, outcome.canvas
        if self.slots.kind.mask_token is None:
            chosen = torch.ones_like(after.masked)  # every step predicts the whole canvas
        else:
            chosen = (after.tokens != before.tokens) | before.masked
        return chosen & ~(after.masked | outcome.skips_denoise[:, None])

    def keep(
        self,
        plan: StepPlan,
        now: SlotStatus,
        outcome: StepOutcome,
        fresh: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the outcome to the slots, and return the tokens to read next, int64 ``[n, L]``.

        `now` has the columns of the plan's rows, and `fresh` is `Readings.next_canvas`.
        """
        leaves, begins = outcome.leaves, outcome.begins
        for batch, new in zip(plan.batch.by_algorithm, outcome.state, strict=True):
            if batch.algorithm.state:
                batch.all_slots.keep(batch.slots, new, _rows(batch, begins))
        commits_next = outcome.ready_to_leave & ~leaves
        return self.slots.advance(
            plan.slots,
            now,
            outcome.canvas,
            leaves,
            plan.width,
            fresh,
            phase=torch.where(commits_next, int(Phase.COMMIT), int(Phase.DENOISE)),
            remaining=now.remaining + now.tail - outcome.out,
            tail=outcome.out.masked_fill(leaves, 0),
            ready=outcome.ready.masked_fill(leaves, 0),
            step=(now.step + 1).masked_fill(begins, 0),
        )

    def _ready(
        self,
        plan: StepPlan,
        now: SlotStatus,
        canvas: Canvas,
        done: torch.Tensor,
        reach: torch.Tensor,
    ) -> torch.Tensor:
        """The length of the prefix that may leave, int64 ``[n]``; edited canvases leave whole."""
        width = plan.width
        edits = [batch.algorithm.edits for batch in plan.batch.by_algorithm]
        if all(edits):
            return torch.where(done, width, 0)
        kind, early = self.slots.kind, self.policy.early
        if kind.blocks > 1 and not early:  # the answer's last block, not those after it
            length = kind.block_length
            reach, early = (reach + length - 1) // length * length, True
        elif early:
            reach = torch.where(now.whole, kind.length, reach)
        ready = emitted_length(canvas, reach, early)
        if not isinstance(width, int) and kind.is_cut:
            ready = torch.minimum(ready, width)
        if any(edits):
            ready = torch.where(plan.batch.having("edits"), torch.where(done, width, 0), ready)
        return ready

    def _needs_no_commit(
        self, now: SlotStatus, canvas: Canvas, is_last: torch.Tensor
    ) -> torch.Tensor:
        """Canvases that need no (further) pass over their final tokens, bool ``[n]``."""
        needless = now.read_only
        if self.policy.skip_last_commit:
            needless = needless | is_last
        if self.policy.in_place:
            unread = (canvas.tokens != now.canvas.tokens) | canvas.masked
            needless = needless | ~unread.any(1)
        return needless

    def _streamed(
        self,
        plan: StepPlan,
        now: SlotStatus,
        canvas: Canvas,
        ready_to_leave: torch.Tensor,
        limit: torch.Tensor,
    ) -> torch.Tensor:
        """The length of the prefix that has been output while a canvas stays, int64 ``[n]``.

        It is unchanged unless `streams` lets the prefix decided so far leave.
        """
        state, tail = self.slots, now.tail
        # A compiled function is the same whether a request streams or not.
        if state.kind.mask_token is None or not (plan.compile or plan.batch.flags["may_stream"]):
            return tail
        sends = now.streams & ~ready_to_leave
        # The last position leaves with its canvas: vLLM counts output tokens as computed, and would
        # share a page that has been output in full before its keys and values are final.
        decided = decided_prefix(canvas).clamp_max(state.length - 1)
        return torch.where(sends, torch.minimum(decided, limit), tail)


def _denoised(
    plan: StepPlan, now: SlotStatus, readings: Readings, present: torch.Tensor | None
) -> tuple[Canvas, torch.Tensor, list[Mapping[str, torch.Tensor]]]:
    """The next canvases, whether they are done, and what each algorithm keeps, see `Update`."""
    kind, updates = plan.state.kind, []
    for batch in plan.batch.by_algorithm:
        step, max_steps = _rows(batch, now.step), _rows(batch, now.max_steps)
        context = StepContext(
            statistics=_rows(batch, readings.statistics),
            last=step + 1 >= max_steps,
            parameters=batch.parameters(),
            state=batch.state(),
            step=step,
            noise=_rows(batch, readings.noise),
            present=_rows(batch, present),
            asked=_rows(batch, readings.log_probabilities),
            likeliest=_rows(batch, readings.likeliest),
            edit_tokens=kind.edit_tokens,
            blocks=None if kind.blocks == 1 else BlockLimits(_rows(batch, now.blocks), max_steps),
        )
        updates.append(batch.algorithm.step(_rows(batch, now.canvas), context))
    state = [update.state for update in updates]
    if len(updates) == 1:
        return updates[0].canvas, updates[0].done, state
    tokens = plan.batch.in_order([update.canvas.tokens for update in updates])
    masked = plan.batch.in_order([update.canvas.masked for update in updates])
    done = plan.batch.in_order([update.done for update in updates])
    return Canvas(tokens, masked, now.canvas.fixed), done, state


def _kept_where(old: torch.Tensor, before: Canvas, after: Canvas) -> Canvas:
    """Select canvases of ``before`` where ``old`` (bool ``[n]``) is true, else of ``after``."""
    keep = old[:, None]
    return Canvas(
        torch.where(keep, before.tokens, after.tokens),
        torch.where(keep, before.masked, after.masked),
        after.fixed,
    )


def _rows(batch: AlgorithmBatch, every: OfCanvases) -> OfCanvases:
    """What belongs to an algorithm's canvases, of what the whole batch has; None stays None."""
    own: Any = every
    if own is None or batch.index is None:
        return every
    is_tensor = isinstance(own, torch.Tensor)
    return own.index_select(0, batch.index) if is_tensor else own.take(batch.index)


def _temperatures(state: SlotState, batch: Batch) -> torch.Tensor:
    """The temperatures at which a step's logits are sampled, float32 ``[n]``."""
    now, parts = state.read(batch.slots), []
    for part in batch.by_algorithm:
        of_all = now.temperature, now.step, now.schedule_steps
        own, step, last = (_rows(part, tensor) for tensor in of_all)
        parts.append(part.algorithm.temperature(own, (step, last), part.parameters()))
    return batch.in_order(parts)


def _adjustments(batch: Batch, before: Canvas) -> tuple[torch.Tensor, torch.Tensor] | None:
    """See `StepPlan.adjust`."""
    parts = [
        part.algorithm.adjust(_rows(part, before), part.parameters()) for part in batch.by_algorithm
    ]
    ids = batch.in_order([part and part[0] for part in parts])
    amounts = batch.in_order([part and part[1] for part in parts])
    return None if ids is None or amounts is None else (ids, amounts)
