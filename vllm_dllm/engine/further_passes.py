"""Further passes over the canvases of a step, which to vLLM are one step.

Between two passes over a canvas nothing changes that vLLM plans a step for: positions, pages and
lengths stay, and only the tokens are others. So after the update of a step the model runs again
over the canvases that go on, without vLLM's work around a pass. A canvas that has left, that waits
or that has failed is not read again in this step. What it reports is the outcome of its last pass,
and how many passes came before that one.
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
    from vllm_dllm.engine.model_state import DiffusionModelState

# The most passes of a step, unless `DllmSettings.passes_per_step` says otherwise. With one request
# they save a quarter of the time, and a new request waits until a step ends.
MOST_PASSES = 16
# A step ends when less of its canvases go on, because the others wait for its end.
LEAST_SHARE = 0.8


def most_passes(vllm_config: VllmConfig, served: Served, device: torch.device) -> int:
    """The most passes of a step, which is 1 where a pass must be a step of its own.

    On a GPU it is 1 as well, unless the setting says otherwise.
    """
    parallel, on_cpu = vllm_config.parallel_config, device.type == "cpu"
    full_graphs = vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs()
    obstacles = {
        "no CUDA graph replays whole passes": not on_cpu and not full_graphs,
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
        return asked or (MOST_PASSES if on_cpu else 1)
    if asked is not None and asked > 1:
        raise SettingsError(f"dllm.passes_per_step={asked}: impossible, because {obstacle}")
    return 1


@dataclass(frozen=True)
class PreparedStep:
    """What vLLM has prepared for a step, and the metadata that a model state has made of it.

    The fields are the arguments of ``ModelState.prepare_attn``.
    """

    input_batch: Any
    block_tables: tuple[torch.Tensor, ...]  # [requests, pages] for each KV cache group
    slot_mappings: torch.Tensor  # [KV cache groups, tokens]
    attn_groups: Any
    kv_cache_config: Any
    metadata: dict[str, Any]  # of attention, by layer name

    def canvases(self, rows: np.ndarray, length: int) -> PreparedStep:
        """The canvases of some rows of the batch, `length` positions each, without metadata."""
        step, count = self.input_batch, len(rows)
        index = torch.from_numpy(rows)
        token = step.logits_indices.view(-1, length)[index].flatten()
        first: np.ndarray = np.arange(count + 1, dtype=np.int32) * length
        each: np.ndarray = np.full(count, length, dtype=np.int32)
        start = torch.from_numpy(first)
        batch = replace(
            step,
            req_ids=[step.req_ids[row] for row in rows],
            num_reqs=count,
            num_reqs_after_padding=count,
            idx_mapping=step.idx_mapping[index],
            idx_mapping_np=step.idx_mapping_np[rows],
            num_scheduled_tokens=each,
            num_tokens=len(token),
            num_tokens_after_padding=len(token),
            num_draft_tokens=len(token),
            num_draft_tokens_per_req=each,
            query_start_loc=start,
            query_start_loc_np=first,
            seq_lens=step.seq_lens[index],
            seq_lens_cpu_upper_bound=step.seq_lens_cpu_upper_bound[index],
            input_ids=step.input_ids[token],
            positions=step.positions[token],
            is_padding=step.is_padding[token],
            logits_indices=torch.arange(len(token)),
            cu_num_logits=start,
            cu_num_logits_np=first,
        )
        tables = tuple(table[index] for table in self.block_tables)
        mappings = self.slot_mappings[:, token]
        return replace(self, input_batch=batch, block_tables=tables, slot_mappings=mappings)


class FurtherPasses:
    """Takes the further passes of a model state's steps."""

    def __init__(self, state: DiffusionModelState, req_states: Any, most: int) -> None:
        """`most` is the number of passes of a step, its first one included."""
        self.state = state
        self.req_states = req_states
        self.most = most

    def another(self, passes: int, canvases: int, of: int) -> bool:
        """Whether `passes` are followed by one over `canvases` of the step's canvases."""
        return passes < self.most and canvases > 0 and canvases >= LEAST_SHARE * of

    def take(self, batch: Batch, output: SamplerOutput) -> SamplerOutput:
        """Take the passes after the first one of a step, and return what its canvases report.

        `batch` has the requests of the step, each with a whole canvas, and `output` is the outcome
        of the first pass.
        """
        sampler, slots = self.state.sampler, self.state.slots
        assert sampler is not None
        # What a pass has done is wanted before the next one.
        single = (slots.records | slots.may_stream)[batch.on_host]
        step = now = self.state.prepared
        rows: np.ndarray = np.arange(len(batch.slots))
        earlier: np.ndarray = np.zeros(len(rows), dtype=np.int32)
        outcome, passes = output, 1
        while True:
            going = np.flatnonzero((outcome.num_nans.numpy() == 0) & ~single[rows])
            if not self.another(passes, len(going), len(earlier)):
                break
            if len(going) < len(rows) or now.input_batch.num_tokens > len(rows) * slots.length:
                rows = rows[going]
                now = self._prepared(step.canvases(rows, slots.length))
                batch = sampler.canvas_update.batch(
                    now.input_batch.idx_mapping, now.input_batch.idx_mapping_np
                )
            elif not self.state.policy.in_place:
                now = self._prepared(now)
            outcome = sampler.update(self._read(now), batch, slots.length)
            output = _with_rows(output, rows, outcome)
            earlier[rows] = passes
            passes += 1
        if passes > 1:
            output.num_nans = with_earlier_passes(output.num_nans, torch.from_numpy(earlier))
        return output

    def _prepared(self, step: PreparedStep) -> PreparedStep:
        """Make the metadata of a step, which depend on the phases of its canvases."""
        self.state.prepare_attn(
            step.input_batch,
            CUDAGraphMode.NONE,
            step.block_tables,
            step.slot_mappings,
            step.attn_groups,
            step.kv_cache_config,
        )
        return self.state.prepared

    def _read(self, step: PreparedStep) -> torch.Tensor:
        """Read the canvases as they are now: hidden states ``[canvas positions, hidden]``."""
        state, batch = self.state, step.input_batch
        read_canvases(batch, self.req_states.draft_tokens)
        inputs = {
            "input_ids": batch.input_ids,
            "positions": batch.positions,
            "inputs_embeds": None,
            "intermediate_tensors": None,
        } | state.prepare_inputs(batch, self.req_states)
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


def _with_rows(output: SamplerOutput, rows: np.ndarray, new: SamplerOutput) -> SamplerOutput:
    """The output of a step in which `rows` are those of `new`."""
    if len(rows) == len(output.num_nans):
        return new
    index = torch.from_numpy(rows)
    for name in ("sampled_token_ids", "num_nans", "num_sampled", "num_rejected"):
        getattr(output, name).index_copy_(0, index, getattr(new, name))
    return output
