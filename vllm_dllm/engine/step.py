"""One step over a batch of canvases: plan, decide, keep.

- `CanvasUpdate.plan` says what must be read from the model's output.
- `CanvasUpdate.decide` runs the algorithms. An algorithm computes the next canvas and whether it is
  done, which determines what the canvas does next: go on, wait, commit, or leave.
- `CanvasUpdate.keep` writes that to the slots.

All of this consists of tensor operations on all canvases at once; the only loops are over the
algorithms that share the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch

from vllm_dllm.decoding import Algorithm, Canvas, StepContext, Update
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
        # Whether there are compiled functions, whether they are being compiled now, the algorithm
        # whose canvases one of them updates at once, and those whose steps are compiled; see
        # `warm_up.compile_updates`.
        self.compiles = self.compiles_ahead = False
        self.compiled_algorithm: str | None = None
        self.compiled_steps: set[str] = set()
        seats = len(slots.tokens)
        self._every = torch.arange(seats, device=slots.device)
        self._full = torch.full_like(self._every, slots.length)  # the widths of full canvases
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
        # What verifies, and a batch without a soft embedding, would need functions of their own.
        compile = self.compiles and batch.verifies is None
        compile = compile and (state.kind.mask_token is not None or batch.flags["several_steps"])
        own = len(every) == 1 and every[0].algorithm.name == self.compiled_algorithm
        at_once = compile and own and not batch.observers and isinstance(width, int)
        if "temperature" in batch.overridden:
            temperature = self.compilable(_temperatures, own)(state, batch)
        else:
            temperature = state.temperature.index_select(0, slots)
        if compile and not at_once and isinstance(width, int):
            width = self._full[: len(slots)]
        plan = StepPlan(batch, state, width, temperature, compile=compile, at_once=at_once)
        if plan.draws and any(part.algorithm.own_confidence for part in every):
            plan.own_confidence = temperature * batch.having("own_confidence")
        if batch.reads_masked:
            plan.masked = state.masked.index_select(0, slots)
        if "ask" in batch.overridden:
            step = plan.status.step
            states = [part.state(_rows(part, step)) for part in every]
            plan.ask = batch.in_order(
                [part.algorithm.ask(state) for part, state in zip(every, states, strict=True)]
            )
        if "adjust" in batch.overridden:
            plan.adjust = _adjustments(batch, plan.status.canvas)
        if batch.flags["constrained"]:
            may_revise = plan.status.edits & ~self._finished(plan.status)
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
        if self.compiles_ahead and key not in self._compiled:
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
        paths: FollowedPaths | None = None,
    ) -> StepOutcome:
        """Run the algorithms, and decide for each canvas whether it goes on, commits or leaves.

        `now` has the columns of the plan's rows, and `paths` is None if no canvas has a constraint.
        """
        canvas, done = self.denoised(plan, now, readings)
        settled = self.compilable(CanvasUpdate.settled, plan.in_parts)
        outcome: StepOutcome = settled(self, plan, now, canvas, done, paths)
        return outcome

    def denoised(
        self, plan: StepPlan, now: SlotStatus, readings: Readings
    ) -> tuple[Canvas, torch.Tensor]:
        """Run the algorithms: the next canvases, and whether they are done, bool ``[n]``."""
        updates = []
        for part in plan.batch.by_algorithm:
            algorithm, own = part.algorithm, readings
            compile = plan.in_parts and algorithm.name in self.compiled_steps
            if compile:
                own = readings.common(algorithm.reads_entropy)
                if part.index is None:
                    part = replace(part, index=self._every[: len(part.slots)])
            step = self.compilable(_step, compile, (algorithm.name,))
            updates.append(step(part, plan.state, now, own, plan.width))
        in_order = plan.batch.in_order
        # An algorithm that is not ours may return views, and tokens of another dtype.
        tokens = in_order([update.canvas.tokens.long() for update in updates]).contiguous()
        masked = in_order([update.canvas.masked for update in updates]).contiguous()
        done = in_order([update.done for update in updates]).contiguous()
        if self.compiles_ahead:  # so that they are not taken for what an algorithm left as it was
            tokens, masked = tokens.clone(), masked.clone()
        return Canvas(tokens, masked, now.canvas.fixed), done

    def settled(
        self,
        plan: StepPlan,
        now: SlotStatus,
        canvas: Canvas,
        done: torch.Tensor,
        paths: FollowedPaths | None,
    ) -> StepOutcome:
        """`decide` after the algorithms, with the canvases and `done` (bool ``[n]``) of theirs."""
        policy = self.policy
        commits = now.phase == int(Phase.COMMIT)
        # Without lockstep a finished canvas commits at once, and one comparison is enough.
        skips = self._finished(now) if policy.sync else commits
        waits = None if paths is None else paths.waits
        if waits is not None:
            skips = skips | waits
        stays = skips if policy.sync else waits

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
            decided=self._decided(now.canvas, canvas, skips),
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

    def _decided(self, before: Canvas, after: Canvas, skips: torch.Tensor) -> torch.Tensor:
        """See `StepOutcome.decided`; `skips` is its `skips_denoise`."""
        if self.slots.kind.mask_token is None:
            chosen = torch.ones_like(after.masked)  # every step predicts the whole canvas
        else:
            chosen = (after.tokens != before.tokens) | before.masked
        return chosen & ~(after.masked | skips[:, None])

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
        leaves = outcome.leaves
        commits_next = outcome.ready_to_leave & ~leaves
        return self.slots.advance(
            plan.slots,
            now,
            outcome.canvas,
            leaves,
            plan.moves(now),
            fresh,
            phase=torch.where(commits_next, int(Phase.COMMIT), int(Phase.DENOISE)),
            remaining=now.remaining + now.tail - outcome.out,
            tail=outcome.out.masked_fill(leaves, 0),
            ready=outcome.ready.masked_fill(leaves, 0),
            step=(now.step + 1).masked_fill(outcome.begins, 0),
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
        whole = torch.where(done, width, 0)
        edits = {batch.algorithm.edits for batch in plan.batch.by_algorithm}
        if not plan.in_parts and False not in edits:
            return whole
        kind, early = self.slots.kind, self.policy.early
        if kind.blocks > 1 and not early:  # the answer's last block, not those after it
            length = kind.block_length
            reach, early = (reach + length - 1) // length * length, True
        elif early:
            reach = torch.where(now.whole, kind.length, reach)
        ready = emitted_length(canvas, reach, early)
        if not isinstance(width, int) and kind.is_cut:
            ready = torch.minimum(ready, width)
        if plan.in_parts or True in edits:
            ready = torch.where(now.edits, whole, ready)
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


def _step(
    batch: AlgorithmBatch,
    slots: SlotState,
    now: SlotStatus,
    readings: Readings,
    width: torch.Tensor | int,
) -> Update:
    """One algorithm's step over its canvases, ``[m, L]``, which keeps its state.

    The arguments after `slots` have the rows of the whole batch.
    """
    kind, present = slots.kind, None
    if not isinstance(width, int):
        present = slots.position < width[:, None]
    step, max_steps = _rows(batch, now.step), _rows(batch, now.max_steps)
    context = StepContext(
        statistics=_rows(batch, readings.statistics),
        last=step + 1 >= max_steps,
        parameters=batch.parameters(),
        state=batch.state(step),
        step=step,
        noise=_rows(batch, readings.noise),
        present=_rows(batch, present),
        asked=_rows(batch, readings.log_probabilities),
        likeliest=_rows(batch, readings.likeliest),
        edit_tokens=kind.edit_tokens,
        blocks=None if kind.blocks == 1 else BlockLimits(_rows(batch, now.blocks), max_steps),
    )
    update = batch.algorithm.step(_rows(batch, now.canvas), context)
    batch.keep(update.state)
    return update


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
        None
        if type(part.algorithm).adjust is Algorithm.adjust
        else part.algorithm.adjust(_rows(part, before), part.parameters())
        for part in batch.by_algorithm
    ]
    ids = batch.in_order([part and part[0] for part in parts])
    amounts = batch.in_order([part and part[1] for part in parts])
    return None if ids is None or amounts is None else (ids, amounts)
