"""The sampler of a block-diffusion model: one decoding update for every canvas in the batch.

What it returns is vLLM's speculative-decoding accounting (`num_sampled`, `num_rejected`):

    prefill chunk          0, 0             the cache advances by the chunk
    last prefill chunk     0, r             the worker goes back to the block's boundary (r = tail)
    denoise step           0, L             nothing advances
    commit                 emitted, 0       the canvas leaves, the cache advances by L

A steady step is tensor operations on all slots at once: no loop over requests and no
copy from the device to the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from vllm_dllm.config import DllmSettings, parse_request_options
from vllm_dllm.decoding import Algorithm, Canvas, StepContext, emitted_length
from vllm_dllm.engine.requests import Phase, SlotState
from vllm_dllm.ops.row_stats import RowStatistics, row_statistics

# Float32 logits that may exist at one time; more rows than fit go in turns.
HEAD_BYTES = 256 << 20


@dataclass(frozen=True)
class RequestDefaults:
    """What a request gets when it does not choose."""

    threshold: float
    max_steps: int
    eos_early_stop: bool

    @classmethod
    def of(cls, settings: DllmSettings, max_steps: int) -> RequestDefaults:
        """The server's settings, with the step cap resolved."""
        return cls(settings.threshold, max_steps, settings.eos_early_stop)


class DiffusionSampler:
    """Stands where vLLM's ``Sampler`` stands; the attributes below are those the runner reads."""

    compute_nans = False

    def __init__(
        self,
        req_states: Any,
        slots: SlotState,
        algorithm: Algorithm,
        head: Callable[[torch.Tensor], torch.Tensor],
        defaults: RequestDefaults,
    ) -> None:
        self.req_states = req_states
        self.slots = slots
        self.algorithm = algorithm
        self.head = head
        self.defaults = defaults
        self.positions = torch.arange(slots.length, device=slots.device)
        # The runner counts output tokens for penalties; None switches that off.
        self.penalties_state = SimpleNamespace(output_bin_counts=None)

    def add_request(self, req_idx: int, sampling_params: Any) -> None:
        """Take over what the request chose (validated at admission)."""
        options = parse_request_options(sampling_params.extra_args)
        end_tokens: set[int] = set()
        if self.defaults.eos_early_stop:
            end_tokens.update(sampling_params.stop_token_ids or ())
            if sampling_params.eos_token_id is not None:
                end_tokens.add(sampling_params.eos_token_id)
        threshold = self.defaults.threshold if options.threshold is None else options.threshold
        self.slots.configure(
            req_idx,
            max_steps=options.max_steps or self.defaults.max_steps,
            end_tokens=end_tokens,
            parameters={"threshold": threshold},
        )

    def apply_staged_writes(self) -> None:
        """Nothing is staged: `add_request` writes to the slot itself."""

    def __call__(self, hidden_states: torch.Tensor, input_batch: Any) -> SamplerOutput:
        """One update.

        Args:
            hidden_states: ``[canvases * L, hidden]``, in batch order (the model's
                ``compute_logits`` passes hidden states through).
            input_batch: vLLM's ``InputBatch``.
        """
        rows = input_batch.num_reqs
        device = hidden_states.device
        sampled = torch.zeros((rows, self.slots.length), dtype=torch.int32, device=device)
        num_sampled = torch.zeros(rows, dtype=torch.int32, device=device)
        num_rejected = torch.zeros(rows, dtype=torch.int32, device=device)
        output = SamplerOutput(sampled, None, None, num_sampled, num_rejected)

        is_canvas = np.diff(input_batch.cu_num_logits_np[: rows + 1]) == self.slots.length
        if input_batch.num_draft_tokens and is_canvas.all():
            self._update(hidden_states, input_batch.idx_mapping[:rows], None, output)
            return output
        self._finish_prefills(input_batch, ~is_canvas, num_rejected)
        if input_batch.num_draft_tokens:
            row = torch.from_numpy(np.flatnonzero(is_canvas)).to(device, non_blocking=True)
            self._update(hidden_states, input_batch.idx_mapping[row], row, output)
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
        self,
        hidden_states: torch.Tensor,
        slot: torch.Tensor,  # [canvases]
        row: torch.Tensor | None,  # [canvases], None when every row is a canvas
        output: SamplerOutput,
    ) -> None:
        state = self.slots
        before = state.canvas(slot)
        commit = state.phase[slot] == Phase.COMMIT  # [canvases]
        step = state.step[slot] + 1
        context = StepContext(
            statistics=self._statistics(hidden_states).view(-1, state.length),
            last=step >= state.max_steps[slot],
            parameters={name: tensor[slot] for name, tensor in state.parameters.items()},
        )
        after = self.algorithm.step(before, context)
        ready = emitted_length(after, state.end_tokens[slot])
        self._emit(before, slot, row, commit, output)

        # A committed canvas makes room for the next block: all masked, nothing fixed.
        fresh = commit[:, None]
        tokens = torch.where(fresh, state.mask_token, after.tokens)
        state.store(slot, Canvas(tokens, after.masked | fresh, after.fixed & ~fresh))
        state.tail.index_copy_(0, slot, state.tail[slot] * ~commit)
        state.step.index_copy_(0, slot, step * ~commit)
        state.ready.index_copy_(0, slot, ready)
        finished = (ready > 0) & ~commit
        state.phase.index_copy_(
            0, slot, torch.where(finished, int(Phase.COMMIT), int(Phase.DENOISE)).to(torch.int8)
        )
        self.req_states.draft_tokens.index_copy_(0, slot, tokens)

    def _emit(
        self,
        canvas: Canvas,
        slot: torch.Tensor,
        row: torch.Tensor | None,
        commit: torch.Tensor,
        output: SamplerOutput,
    ) -> None:
        """Fill the output of canvases: tokens behind the prompt's tail, or a rejection."""
        state = self.slots
        tail = state.tail[slot]
        source = (self.positions + tail[:, None]).clamp_max(state.length - 1)  # [canvases, L]
        sampled = canvas.tokens.gather(1, source).int()
        num_sampled = ((state.ready[slot] - tail) * commit).int()
        num_rejected = (state.length * ~commit).int()
        if row is None:
            output.sampled_token_ids.copy_(sampled)
            output.num_sampled.copy_(num_sampled)
            output.num_rejected.copy_(num_rejected)
        else:
            output.sampled_token_ids.index_copy_(0, row, sampled)
            output.num_sampled.index_copy_(0, row, num_sampled)
            output.num_rejected.index_copy_(0, row, num_rejected)

    def _statistics(self, hidden_states: torch.Tensor) -> RowStatistics:
        """Row statistics ``[rows]``, a bounded number of rows of logits at a time."""
        at_a_time = max(1, HEAD_BYTES // (4 * self.req_states.vocab_size))
        parts = [
            row_statistics(self.head(chunk), self.slots.mask_token)
            for chunk in hidden_states.split(at_a_time)
        ]
        if len(parts) == 1:
            return parts[0]
        return RowStatistics(
            torch.cat([part.token for part in parts]),
            torch.cat([part.probability for part in parts]),
        )
