"""Further passes over the canvases of a step, which to vLLM are one step.

Between two passes over a canvas nothing changes that vLLM plans a step for: positions, pages and
lengths stay, and only the tokens are others. So after the update of a step the model runs again,
without vLLM's work around a pass, until a canvas leaves, waits or fails.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import set_forward_context
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from vllm_dllm.engine.contracts import Batch
from vllm_dllm.engine.input_ids import read_canvases
from vllm_dllm.ranges import SettingsError
from vllm_dllm.settings.resolution import Served
from vllm_dllm.vllm_seams.channels import with_earlier_passes

if TYPE_CHECKING:
    from vllm_dllm.engine.model_state_view import ModelStateView

# Unless `DllmSettings.passes_per_step` says otherwise. A new request waits until a step ends.
MOST_PASSES = 16


def replays(vllm_config: VllmConfig) -> bool:
    """Whether CUDA graphs replay whole passes."""
    return bool(vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs())


def most_passes(vllm_config: VllmConfig, served: Served, device: torch.device) -> int:
    """The most passes of a step, which is 1 where a pass must be a step of its own.

    It is 1 on a GPU as well, unless the setting says otherwise. Raises `SettingsError`.
    """
    parallel = vllm_config.parallel_config
    reads_at_once = device.type == "cpu" and not replays(vllm_config)
    obstacles = {
        "no CUDA graph replays whole passes": not (reads_at_once or replays(vllm_config)),
        "all canvases of a batch leave together": served.settings.execution == "sync",
        "a pass reads two blocks": served.two_blocks,
        "there are pipeline stages": parallel.pipeline_parallel_size > 1,
        "data-parallel engines take their passes together": parallel.data_parallel_size > 1,
        "a LoRA adapter is chosen for each token of a step": vllm_config.lora_config is not None,
        "keys and values are transferred": vllm_config.kv_transfer_config is not None,
    }
    asked = served.settings.passes_per_step
    obstacle = next((reason for reason, holds in obstacles.items() if holds), None)
    if obstacle is None:
        return asked or (MOST_PASSES if reads_at_once else 1)
    if asked is not None and asked > 1:
        raise SettingsError(f"dllm.passes_per_step={asked}: impossible, because {obstacle}")
    return 1


@dataclass(frozen=True)
class PreparedStep:
    """The arguments of ``ModelState.prepare_attn`` in a step, and the metadata that it returned."""

    input_batch: Any
    cudagraph_mode: CUDAGraphMode
    block_tables: tuple[torch.Tensor, ...]  # [requests, pages] for each KV cache group
    slot_mappings: torch.Tensor  # [KV cache groups, tokens]
    attn_groups: Any
    kv_cache_config: Any
    metadata: dict[str, Any]

    def again(self, state: ModelStateView) -> PreparedStep:
        """The same, with metadata for the present phases of the canvases."""
        given = self.input_batch, self.cudagraph_mode, self.block_tables, self.slot_mappings
        state.prepare_attn(*given, self.attn_groups, self.kv_cache_config)
        return state.prepared

    def canvases(self, length: int) -> PreparedStep:
        """Leave out the blocks that the step reads before the canvases; without metadata."""
        step = self.input_batch
        token, count = step.logits_indices, step.num_reqs
        start: np.ndarray = np.arange(count + 1, dtype=np.int32) * length
        batch = replace(
            step,
            num_scheduled_tokens=np.full(count, length, dtype=np.int32),
            num_tokens=len(token),
            num_tokens_after_padding=len(token),
            query_start_loc=torch.from_numpy(start),
            query_start_loc_np=start,
            input_ids=step.input_ids[token],
            positions=step.positions[token],
            is_padding=step.is_padding[token],
            logits_indices=torch.arange(len(token)),
        )
        return replace(self, input_batch=batch, slot_mappings=self.slot_mappings[:, token])


class FurtherPasses:
    """Takes the further passes of a model state's steps."""

    def __init__(self, state: ModelStateView, req_states: Any, most: int) -> None:
        """`most` is the number of passes of a step, its first one included."""
        self.state = state
        self.req_states = req_states
        self.most = most

    def follows(self, passes: int) -> bool:
        """Whether another pass follows so many, if all canvases go on."""
        return passes < self.most

    def take(self, batch: Batch, output: SamplerOutput) -> SamplerOutput:
        """Take the passes after the first one of a step, and return the outcome of the last one.

        `batch` has the requests of the step, each with a whole canvas, and `output` is the outcome
        of the first pass.
        """
        if batch.flags["records"] or batch.flags["may_stream"]:
            return output  # what a pass has done is wanted before the next one
        state, length = self.state, self.state.slots.length
        step, passes = state.prepared, 1
        assert state.sampler is not None
        while self.follows(passes) and not output.num_nans.any():
            if step.input_batch.num_tokens > len(batch.slots) * length:
                step = step.canvases(length).again(state)
            elif not state.policy.in_place:
                step = step.again(state)
            output = state.sampler.update(self._read(step), batch, length)
            passes += 1
        if passes > 1:
            output.num_nans = with_earlier_passes(output.num_nans, passes - 1)
        return output

    def _read(self, step: PreparedStep) -> torch.Tensor:
        """Read the canvases as they are now: hidden states ``[canvas positions, hidden]``."""
        state, batch = self.state, step.input_batch
        read_canvases(batch, self.req_states.draft_tokens)
        inputs = dict.fromkeys(("inputs_embeds", "intermediate_tensors"))
        inputs |= {"input_ids": batch.input_ids, "positions": batch.positions}
        inputs |= state.prepare_inputs(batch, self.req_states)
        with set_forward_context(
            step.metadata,
            state.vllm_config,
            num_tokens=batch.num_tokens_after_padding,
            slot_mapping=build_slot_mappings_by_layer(step.slot_mappings, step.kv_cache_config),
            is_padding=batch.is_padding,
        ):
            hidden = state.model(**inputs)
        read: torch.Tensor = state.model.compute_logits(hidden[batch.logits_indices])
        return read
