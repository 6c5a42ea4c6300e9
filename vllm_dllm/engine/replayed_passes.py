"""Further passes of a step on a GPU: replays of the CUDA graph that has run its first one.

Only the device knows what the canvases of a step do, so the number of passes is decided before.
All canvases are read in all of them; where one has stopped, because it has left, waits or has
failed, its slot does not change and no keys and values are stored.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from vllm_dllm.engine.contracts import Batch
from vllm_dllm.engine.input_ids import read_canvases
from vllm_dllm.vllm_seams.channels import with_earlier_passes

if TYPE_CHECKING:
    from vllm_dllm.engine.further_passes import PreparedStep
    from vllm_dllm.engine.model_state_view import ModelStateView


class ReplayedPasses:
    """In the place of `further_passes.FurtherPasses` where CUDA graphs replay whole passes."""

    def __init__(self, state: ModelStateView, req_states: Any, passes: int) -> None:
        """`passes` is the number of passes of a step, its first one included."""
        self.state = state
        self.req_states = req_states
        self.passes = passes

    def take(self, batch: Batch, output: SamplerOutput) -> SamplerOutput:
        """See `FurtherPasses.take`."""
        sampler, length = self.state.sampler, self.state.slots.length
        step = self.state.prepared
        graph = self._graph(step)
        # What a pass has done is wanted before the next one; constraints are looked up by the host.
        single = any(batch.flags[name] for name in ("records", "may_stream", "constrained"))
        if graph is None or single:
            return output
        assert sampler is not None
        earlier = torch.zeros_like(output.num_nans)
        for _ in range(1, self.passes):
            stopped = output.num_nans != 0
            earlier = earlier + ~stopped
            hidden = self._replay(graph, step, stopped)
            spoiled = self.state.slots.spoiled[batch.slots] & stopped
            new = sampler.update(hidden, batch, length, stopped)
            self.state.slots.spoiled[batch.slots] |= spoiled
            output = _merged(output, new, stopped)
        return replace(output, num_nans=with_earlier_passes(output.num_nans, earlier))

    def _graph(self, step: PreparedStep) -> Any:
        """The full graph that has run the first pass; None if none has, or a prompt ended in it."""
        batch, length = step.input_batch, self.state.slots.length
        if step.cudagraph_mode != CUDAGraphMode.FULL or batch.has_prefill:
            return None
        shape = batch.num_reqs, batch.num_tokens, length
        return self.state.graphs.dispatch(*shape, 0, max_query_len=length)

    def _replay(self, graph: Any, step: PreparedStep, stopped: torch.Tensor) -> torch.Tensor:
        """Read the canvases as they are now: hidden states ``[canvas positions, hidden]``."""
        state, batch = self.state, step.input_batch
        stored = step.slot_mappings[:, : batch.num_tokens].unflatten(1, (batch.num_reqs, -1))
        stored.masked_fill_(stopped[:, None], PAD_SLOT_ID)
        if not state.policy.in_place:  # attention depends on the phases of canvases
            step.again(state)
        read_canvases(batch, self.req_states.draft_tokens)
        state.prepare_inputs(batch, self.req_states)
        hidden = state.graphs.run_fullgraph(graph)
        read: torch.Tensor = state.model.compute_logits(hidden[batch.logits_indices])
        return read


def _merged(old: SamplerOutput, new: SamplerOutput, stopped: torch.Tensor) -> SamplerOutput:
    """What canvases report: the old where they have stopped, bool ``[n]``, else the new."""
    names = ("num_nans", "num_sampled", "num_rejected")
    counts = {n: torch.where(stopped, getattr(old, n), getattr(new, n)) for n in names}
    tokens = torch.where(stopped[:, None], old.sampled_token_ids, new.sampled_token_ids)
    return replace(new, sampled_token_ids=tokens, **counts)
