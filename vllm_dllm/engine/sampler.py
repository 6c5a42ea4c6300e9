"""The sampler of a block-diffusion model: one decoding update for every canvas in the batch.

What it returns is vLLM's speculative-decoding accounting (`num_sampled`, `num_rejected`):

    prefill chunk          0, 0             the cache advances by the chunk
    last prefill chunk     0, r             the worker goes back to the block's boundary (r = tail)
    denoise step           0, L             nothing advances (with `stream_prefix`: new, L)
    commit                 emitted, 0       the canvas leaves, the cache advances by L

A steady step is tensor operations on all slots at once: no loop over requests and no
copy from the device to the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from vllm_dllm.engine.decoder import Decoder, Policy
from vllm_dllm.engine.requests import Phase, SlotState
from vllm_dllm.engine.self_conditioning import SelfConditioning
from vllm_dllm.engine.statistics import Statistics
from vllm_dllm.engine.whole_rows import WholeRows


@dataclass(frozen=True)
class Canvases:
    """The canvases of a batch, in batch order.

    Attributes:
        slot: int64 ``[n]``.
        slot_on_host: the same for numpy.
        row: int64 ``[n]``, their batch rows; None when every row is a canvas.
        width: int64 ``[n]``, positions that were scheduled; None when all are L wide.
    """

    slot: torch.Tensor
    slot_on_host: np.ndarray
    row: torch.Tensor | None
    width: torch.Tensor | None


class DiffusionSampler:
    """Stands where vLLM's ``Sampler`` stands; the attributes below are those the runner reads."""

    compute_nans = False

    def __init__(
        self,
        req_states: Any,
        slots: SlotState,
        policy: Policy,
        statistics: Statistics,
        whole: WholeRows,
        conditioning: SelfConditioning | None = None,
    ) -> None:
        self.req_states = req_states
        self.slots = slots
        self.decoder = Decoder(slots, policy)
        self.statistics = statistics
        self.conditioning = conditioning
        self.whole = whole
        whole.history = req_states.all_token_ids.gpu
        self.positions = torch.arange(slots.length, device=slots.device)
        # The runner counts output tokens for penalties; None switches that off.
        self.penalties_state = SimpleNamespace(output_bin_counts=None)

    def add_request(self, req_idx: int, sampling_params: Any) -> None:
        """Nothing: the model state has set the slot up, with these parameters."""

    def apply_staged_writes(self) -> None:
        """Nothing is staged: slots are written directly."""

    def __call__(self, hidden_states: torch.Tensor, input_batch: Any) -> SamplerOutput:
        """One update.

        Args:
            hidden_states: ``[canvas positions, hidden]``, in batch order (the model's
                ``compute_logits`` passes hidden states through).
            input_batch: vLLM's ``InputBatch``.
        """
        rows = input_batch.num_reqs
        device = hidden_states.device
        sampled = torch.zeros((rows, self.slots.length), dtype=torch.int32, device=device)
        num_sampled = torch.zeros(rows, dtype=torch.int32, device=device)
        num_rejected = torch.zeros(rows, dtype=torch.int32, device=device)
        output = SamplerOutput(sampled, None, None, num_sampled, num_rejected)

        widths = np.diff(input_batch.cu_num_logits_np[: rows + 1])
        mapping = input_batch.idx_mapping[:rows]
        is_canvas = widths > 0
        row = None
        if not is_canvas.all():
            self._finish_prefills(input_batch, ~is_canvas, num_rejected)
            row = torch.from_numpy(np.flatnonzero(is_canvas)).to(device, non_blocking=True)
            mapping = mapping[row]
        if input_batch.num_draft_tokens:
            width = None
            if (widths[is_canvas] != self.slots.length).any():
                width = torch.from_numpy(widths[is_canvas]).long().to(device, non_blocking=True)
            slots = input_batch.idx_mapping_np[:rows]
            canvases = Canvases(mapping.long(), slots[is_canvas], row, width)
            # Where the tokens that leave begin in their canvas; renewed canvases forget it.
            first = self.slots.tail[input_batch.idx_mapping[:rows].long()]
            self._update(hidden_states, canvases, output)
            if self.whole.kept:
                output.logprobs_tensors = self.whole.collect(slots, num_sampled, first)
        return output

    def _finish_prefills(
        self, input_batch: Any, is_prefill: np.ndarray, num_rejected: torch.Tensor
    ) -> None:
        """Requests whose prompt is complete show their canvas and go back to its start."""
        rows = input_batch.num_reqs
        computed = input_batch.num_computed_prefill_tokens_np[:rows]
        behind = computed + input_batch.num_scheduled_tokens[:rows]
        done = np.flatnonzero(is_prefill & (behind >= input_batch.prefill_len_np[:rows]))
        if not len(done):
            return
        row = torch.from_numpy(done).to(num_rejected.device, non_blocking=True)
        slot = input_batch.idx_mapping[row]
        num_rejected.index_copy_(0, row, self.slots.tail[slot].int())
        self.slots.phase.index_fill_(0, slot, int(Phase.DENOISE))
        self.req_states.draft_tokens.index_copy_(0, slot, self.slots.tokens[slot])

    def _update(
        self, hidden_states: torch.Tensor, canvases: Canvases, output: SamplerOutput
    ) -> None:
        state, slot = self.slots, canvases.slot
        before = state.canvas(slot)
        present = None
        if canvases.width is not None:
            present = self.positions < canvases.width[:, None]
            hidden_states = self._padded(hidden_states, canvases.width)
        width = state.length if canvases.width is None else canvases.width
        plan = self.decoder.plan(before, slot, canvases.slot_on_host)
        rows = self.statistics(hidden_states, plan.wanted)
        outcome = self.decoder.decide(plan, rows, present, width)
        source = torch.where(outcome.commits[:, None], before.tokens, outcome.canvas.tokens)
        emitted = torch.where(outcome.leaves, outcome.emitted, outcome.streamed)
        self._emit(source, emitted, outcome.leaves, canvases, output)
        self.whole.report(outcome.canvas.tokens, outcome.decided, canvases.slot_on_host)

        self.decoder.keep(plan, outcome, width)
        self.req_states.draft_tokens.index_copy_(0, slot, state.tokens[slot])
        if self.conditioning is not None and rows.soft is not None:
            self.conditioning.store(slot, rows.soft, outcome.goes_on)

    def _padded(self, hidden_states: torch.Tensor, width: torch.Tensor) -> torch.Tensor:
        """Rows of narrow canvases spread out to L each; what lies behind them is arbitrary."""
        first = width.cumsum(0) - width
        index = (first[:, None] + self.positions).clamp_max(len(hidden_states) - 1)
        return hidden_states[index.flatten()]

    def _emit(
        self,
        tokens: torch.Tensor,
        emitted: torch.Tensor,
        leaves: torch.Tensor,
        canvases: Canvases,
        output: SamplerOutput,
    ) -> None:
        """Fill the output of canvases: tokens behind what is out already, or a rejection.

        What is streamed counts for vLLM like a longer prompt: its scheduler goes on behind it,
        the worker at the start of the canvas.
        """
        state = self.slots
        tail = state.tail[canvases.slot]
        source = (self.positions + tail[:, None]).clamp_max(state.length - 1)  # [n, L]
        sampled = tokens.gather(1, source).int()
        num_sampled = (emitted - tail).int()
        width = state.length if canvases.width is None else canvases.width
        num_rejected = (width * ~leaves).int()
        if canvases.row is None:
            output.sampled_token_ids.copy_(sampled)
            output.num_sampled.copy_(num_sampled)
            output.num_rejected.copy_(num_rejected)
        else:
            output.sampled_token_ids.index_copy_(0, canvases.row, sampled)
            output.num_sampled.index_copy_(0, canvases.row, num_sampled)
            output.num_rejected.index_copy_(0, canvases.row, num_rejected)
