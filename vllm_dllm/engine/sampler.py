"""The sampler of a block-diffusion model: one decoding update for every canvas in the batch.

It reports its result in terms of vLLM's speculative decoding, as (`num_sampled`, `num_rejected`):

    prefill chunk          0, 0             the cache advances by the chunk
    last prefill chunk     0, r             the worker goes back to the block's boundary (r = tail)
    denoise step           0, L             nothing advances (with `stream_prefix`: new, L)
    commit                 emitted, 0       the canvas leaves, and the cache advances by L
    left without commit    emitted, L       the next step reads this canvas again, and the next one
    verifying commit       n, L - n         the n tokens leave that the pass predicts itself

The table of a window of two blocks is in `engine.two_block_window`.

A steady step consists of tensor operations on all slots at once: it does not loop over requests,
and it never waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from vllm_dllm.engine.contracts import (
    Batch,
    CommitPolicy,
    FollowedPaths,
    LaterPasses,
    Readings,
    Readout,
    StepOutcome,
    StepPlan,
)
from vllm_dllm.engine.optional_parts import OptionalParts
from vllm_dllm.engine.slots import Phase, SlotState, SlotStatus
from vllm_dllm.engine.step import CanvasUpdate
from vllm_dllm.engine.to_device import to_device
from vllm_dllm.vllm_seams.channels import Failure, encode_passes


class DiffusionSampler:
    """Replaces vLLM's ``Sampler``; it has the attributes and methods that vLLM's runner uses."""

    compute_nans = False

    def __init__(
        self,
        req_states: Any,
        slots: SlotState,
        policy: CommitPolicy,
        readout: Readout,
        parts: OptionalParts,
        predictions: Any = None,
        prepare: Callable[[], None] = lambda: None,
        has_stages: bool = False,
        further: LaterPasses | None = None,
    ) -> None:
        """Make a sampler.

        `predictions` stores a self-conditioned model's last prediction of each canvas, `prepare` is
        called with the dummy batch with which vLLM measures memory, with `has_stages` vLLM sends
        the tokens that leave to earlier pipeline stages, and `further` takes more than one pass in
        a step.
        """
        self.req_states = req_states
        self.slots = slots
        self.canvas_update = CanvasUpdate(slots, policy, parts)
        self.readout = readout
        self.parts = parts
        self.predictions = predictions
        self.prepare = prepare
        self.has_stages = has_stages
        self.further = further
        slots.history = req_states.all_token_ids.gpu
        # The paths of canvases without constraints, for compiled functions: of every slot, and by
        # number of canvases.
        tokens, no = torch.zeros_like(slots.tokens), torch.zeros_like(slots.masked)
        self._no_paths = FollowedPaths(tokens, no, ~no[:, 0], no[:, 0].clone())
        self._no_paths_of: dict[int, FollowedPaths] = {}
        # The runner would count output tokens for penalties; None switches that off.
        self.penalties_state = SimpleNamespace(output_bin_counts=None)

    def add_request(self, req_idx: int, sampling_params: Any) -> None:
        """Do nothing: the model state has already set the slot up with these parameters."""

    def apply_staged_writes(self) -> None:
        """Do nothing: slots are written directly, never staged."""

    def __call__(self, hidden_states: torch.Tensor, input_batch: Any) -> SamplerOutput:
        """Update every canvas of the batch; the output has a row for each request.

        Hidden states are ``[canvas positions, hidden]``, in batch order: the model's
        ``compute_logits`` passes them through.
        """
        rows, drafts = input_batch.num_reqs, input_batch.num_draft_tokens
        if self.parts.under_load is not None:
            self.parts.under_load.prepare(rows)
        if drafts:
            output = self._of_canvases(hidden_states, input_batch)
        else:
            slot = input_batch.idx_mapping[:rows].long()
            output = self._of_mixed(hidden_states, input_batch, slot)
        if self.has_stages:
            output.sampled_token_ids = self._as_received(output.sampled_token_ids, drafts)
        return output

    def _of_canvases(self, hidden_states: torch.Tensor, input_batch: Any) -> SamplerOutput:
        """Update a batch that has canvases, and add what its observers have seen."""
        rows, state = input_batch.num_reqs, self.slots
        on_host = input_batch.idx_mapping_np[:rows]
        batch = self.canvas_update.batch(input_batch.idx_mapping, on_host)
        slot = batch.slots
        # The position in the canvas where the tokens that leave begin; the update resets it.
        first = state.tail[slot] if batch.observers else None
        if self.parts.window is None and input_batch.num_draft_tokens == rows * state.length:
            output = self.update(hidden_states, batch, state.length)
            if self.further is not None:
                output = self.further.take(batch, output)
        else:
            output = self._of_mixed(hidden_states, input_batch, slot)
        if first is not None:
            output.logprobs_tensors = self.parts.reported(batch, first)
        return output

    def _as_received(self, tokens: torch.Tensor, drafts: int) -> torch.Tensor:
        """The tokens that leave, with as many columns as vLLM's ``PPHandler.receive`` expects.

        There is one for each draft token of a request and one for a token after them, which a
        canvas does not have, or one in a step without drafts.
        """
        width = 1 + self.req_states.draft_tokens.shape[1] if drafts else 1
        return pad(tokens, (0, width - tokens.shape[1]))  # a negative number cuts

    def _of_mixed(
        self, hidden_states: torch.Tensor, input_batch: Any, slot: torch.Tensor
    ) -> SamplerOutput:
        """Update a batch of prefills and of canvases of any width."""
        rows, drafts = input_batch.num_reqs, input_batch.num_draft_tokens
        widths = np.diff(input_batch.cu_num_logits_np[: rows + 1])
        if not drafts and widths.any():
            # Only in the dummy batch, each request has one token of logits.
            self.prepare()
        if self.parts.window is not None and drafts:
            hidden_states = self.parts.window.canvas_rows(hidden_states, slot, widths > 0)
            widths //= 2
        if drafts and widths.all():
            batch = self.canvas_update.batch(slot, input_batch.idx_mapping_np[:rows])
            return self.update(hidden_states, batch, self._width(widths))
        return self._among_prefills(hidden_states, input_batch, slot, widths)

    def _width(self, widths: np.ndarray) -> torch.Tensor | int:
        """The number of positions scheduled of each canvas: int64 ``[n]``, or L for all of them."""
        if (widths == self.slots.length).all():
            return self.slots.length
        return to_device(widths.astype(np.int64), self.slots.device)

    def _among_prefills(
        self, hidden_states: torch.Tensor, input_batch: Any, slot: torch.Tensor, widths: np.ndarray
    ) -> SamplerOutput:
        """Update a batch in which not every row is a canvas; prefills output nothing."""
        rows, device = len(widths), hidden_states.device
        sampled = torch.zeros((rows, self.slots.length), dtype=torch.int64, device=device)
        counts = torch.zeros((3, rows), dtype=torch.int32, device=device)
        num_sampled, num_rejected, num_nans = counts.unbind()
        self._begin_canvases(input_batch, widths == 0, num_rejected)
        if input_batch.num_draft_tokens:
            row = to_device(is_canvas := np.flatnonzero(widths), device)
            batch = self.canvas_update.batch(slot[row], input_batch.idx_mapping_np[is_canvas])
            output = self.update(hidden_states, batch, self._width(widths[is_canvas]))
            sampled.index_copy_(0, row, output.sampled_token_ids)
            num_sampled.index_copy_(0, row, output.num_sampled)
            num_rejected.index_copy_(0, row, output.num_rejected)
            num_nans.index_copy_(0, row, output.num_nans)
        return SamplerOutput(sampled, None, num_nans, num_sampled, num_rejected)

    def _begin_canvases(
        self, input_batch: Any, is_prefill: np.ndarray, num_rejected: torch.Tensor
    ) -> None:
        """Start the canvas of requests whose prompt is complete, and go back to its beginning."""
        rows = input_batch.num_reqs
        computed = input_batch.num_computed_prefill_tokens_np[:rows]
        end = computed + input_batch.num_scheduled_tokens[:rows]
        done = np.flatnonzero(is_prefill & (end >= input_batch.prefill_len_np[:rows]))
        if not len(done):
            return
        row = to_device(done, num_rejected.device)
        slot = input_batch.idx_mapping[row].long()
        back = self.slots.tail[slot]
        if self.parts.window is not None:
            back = back + self.parts.window.has_block[slot] * self.slots.length
        num_rejected.index_copy_(0, row, back.int())
        self.slots.phase.index_copy_(0, slot, self.slots.after_prefill[slot])
        self.slots.after_prefill.index_fill_(0, slot, int(Phase.DENOISE))
        self._read_next(slot, self.slots.tokens[slot])

    def _read_next(self, slot: torch.Tensor, canvas: torch.Tensor) -> None:
        """Hand the tokens that the next step reads to vLLM's runner; `canvas` is ``[n, L]``."""
        window = self.parts.window
        tokens = canvas if window is None else window.inputs(slot, canvas)
        self.req_states.draft_tokens.index_copy_(0, slot, tokens)

    def update(
        self,
        hidden_states: torch.Tensor,
        batch: Batch,
        width: torch.Tensor | int,
        stopped: torch.Tensor | None = None,
    ) -> SamplerOutput:
        """Update the canvases of a batch, of this `_width`; the output has a row for each.

        Where `stopped` (bool ``[n]``) is true, the slot has begun a canvas in this step, or its
        request has failed, and it does not change.
        """
        state, slot = self.slots, batch.slots
        if not isinstance(width, int):
            if state.kind.mask_token is not None and state.kind.is_cut:
                present = state.position < width[:, None]
                # The context ends within the canvas: nothing is to be decided after it.
                state.masked.index_copy_(0, slot, state.masked.index_select(0, slot) & present)
            hidden_states = self._padded(hidden_states, width)
        plan = self.canvas_update.plan(batch, width)
        readings = self.readout.read(hidden_states, plan)
        hidden = hidden_states.view(len(slot), state.length, -1)
        paths = None if plan.constraint is None else plan.constraint.followed()
        if stopped is not None:
            paths = replace(self._paths_of_all(plan, paths), waits=stopped)
        if plan.compile:
            paths = self._paths_of_all(plan, paths)
        kind = readings.kind
        finish = self.canvas_update.compilable(DiffusionSampler.finish, plan.at_once, kind)
        output, leaves, out = finish(self, plan, readings, hidden, paths)
        if plan.constraint is not None:
            plan.constraint.advance(out, leaves)
        return output

    def finish(
        self,
        plan: StepPlan,
        readings: Readings,
        hidden: torch.Tensor,
        paths: FollowedPaths | None,
    ) -> tuple[SamplerOutput, torch.Tensor, torch.Tensor]:
        """Decide, report, and write the slots after the readout; `hidden` is ``[n, L, hidden]``.

        Returns the output, and `leaves` and `out` of `StepOutcome`. When this is compiled, a few
        hundred small operators become a handful of kernels. So do its parts where it is not: for
        observers, canvases that are narrower than L, and what requests choose as their algorithm.
        """
        update = self.canvas_update
        now = self.slots.read(plan.slots) if plan.at_once else plan.status
        outcome = update.decide(plan, now, readings, paths)
        for observer in plan.batch.observers:
            observer.observe(plan, outcome, readings)
        write = update.compilable(DiffusionSampler._write, plan.in_parts)
        output = write(self, plan, now, outcome, readings.common(), hidden, paths)
        return output, outcome.leaves, outcome.out

    def _write(
        self,
        plan: StepPlan,
        now: SlotStatus,
        outcome: StepOutcome,
        readings: Readings,
        hidden: torch.Tensor,
        paths: FollowedPaths | None,
    ) -> SamplerOutput:
        """Write the slots, and report; the arguments are those of `finish` and what it has made."""
        slot = plan.slots
        tokens = self.canvas_update.keep(plan, now, outcome, readings.next_canvas)
        if self.predictions is not None:
            soft = readings.soft_embedding
            if soft is None:
                self.predictions.drop(slot)
            else:
                self.predictions.store(slot, soft, outcome.goes_on(), now.canvas.fixed)
        sound = self._sound(plan, outcome, readings, hidden, paths)
        output = self._reported(plan, now, outcome, sound)
        if plan.batch.verifies is not None:
            from vllm_dllm.engine.verifying_pass import verified

            predicted = readings.statistics.token
            output, tokens = verified(plan, now, predicted, sound, output, tokens)
        self._read_next(slot, tokens)
        return output

    def _paths_of_all(self, plan: StepPlan, paths: FollowedPaths | None) -> FollowedPaths:
        """The paths with tensors for all fields, as a compiled function takes them."""
        if paths is not None and paths.waits is not None:
            return paths
        count = len(plan.slots)
        if count not in self._no_paths_of:
            parts = vars(self._no_paths).values()
            self._no_paths_of[count] = FollowedPaths(*(part[:count] for part in parts))
        none = self._no_paths_of[count]
        return none if paths is None else replace(paths, waits=none.waits)

    def _sound(
        self,
        plan: StepPlan,
        outcome: StepOutcome,
        readings: Readings,
        hidden: torch.Tensor,
        paths: FollowedPaths | None,
    ) -> torch.Tensor:
        """Canvases that were read without NaN or infinities, bool ``[n]``.

        Marks the slots of the others as spoiled. Both hidden states and probabilities are checked:
        a greedy choice may hide NaN in the hidden states, and the head may introduce more.
        """
        state, slot = self.slots, plan.slots
        probability = readings.statistics.probability
        # A sum in float32 is finite if all its terms are.
        finite = hidden.sum(-1, dtype=torch.float32).isfinite().all(-1)
        sound = finite & probability.isfinite().all(-1)
        if paths is not None:
            # Paths are always feasible, because only their tokens are kept. If one ever is not, an
            # error is better than a wrong answer. A canvas that waits or commits needs no path.
            sound = sound & (paths.feasible | outcome.skips_denoise)
        own = state.failure[slot] != int(Failure.NONE)
        # Excluding every token does not spoil pages, but the next step may have written NaN.
        state.spoiled.index_copy_(0, slot, ~(finite & (sound | own)))
        return sound & ~own

    def _padded(self, hidden_states: torch.Tensor, width: torch.Tensor) -> torch.Tensor:
        """Hidden states with L rows for each canvas; the rows after a narrow one are arbitrary."""
        first = width.cumsum(0) - width
        index = (first[:, None] + self.slots.position).clamp_max(len(hidden_states) - 1)
        return hidden_states[index.flatten()]

    def _reported(
        self, plan: StepPlan, now: SlotStatus, outcome: StepOutcome, sound: torch.Tensor
    ) -> SamplerOutput:
        """The tokens that leave now, or a rejection; canvases that are not ``sound`` output none.

        To vLLM, streamed tokens look like a longer prompt: its scheduler continues after them,
        while the worker continues at the start of the canvas.
        """
        length, tail, tokens = self.slots.length, now.tail, outcome.shown
        source = (self.slots.position + tail[:, None]).clamp_max(length - 1)  # [n, L]
        ends = self.slots.failure[plan.slots].clamp_min(int(Failure.UNSOUND))
        if self.parts.window is None:
            rejected = plan.width - plan.moves(now) * (outcome.advances & sound)
        else:
            rejected = self.parts.window.move(plan.slots, outcome.leaves, tokens)
        return SamplerOutput(
            sampled_token_ids=tokens.gather(1, source),
            logprobs_tensors=None,
            # The scheduler ends requests that are not sound. If a canvas' keys and values are
            # pending, it goes back to the start of that canvas.
            num_nans=encode_passes(sound, outcome.flags, ends),
            num_sampled=((outcome.out - tail) * sound).int(),
            num_rejected=rejected.int(),
        )
