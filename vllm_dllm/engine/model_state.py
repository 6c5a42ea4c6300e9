"""The model state of a block-diffusion model: what vLLM's runner asks us before each forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata
from vllm.v1.worker.gpu.model_states.interface import ModelState

from vllm_dllm.config import parse_settings
from vllm_dllm.decoding import get_algorithm
from vllm_dllm.engine.attention import split_into_blocks
from vllm_dllm.engine.requests import SlotState
from vllm_dllm.engine.sampler import DiffusionSampler, RequestDefaults
from vllm_dllm.engine.setup import algorithm_name, block_length, check_attention_layers, step_cap


class DiffusionModelState(ModelState):
    """Slots for the sampler, attention metadata for the backbone. Knows no algorithm.

    vLLM sees a canvas as L draft tokens that are all rejected (denoise) or all accepted
    (commit), and no bonus token.
    """

    num_new_sampled_tokens_per_step = 0

    def __init__(
        self, vllm_config: VllmConfig, model: nn.Module, encoder_cache: Any, device: torch.device
    ) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)
        check_attention_layers(vllm_config)
        settings = parse_settings(vllm_config.additional_config)
        self.block_length = block_length(vllm_config)
        self.algorithm = get_algorithm(algorithm_name(vllm_config, settings))
        self.defaults = RequestDefaults.of(settings, step_cap(vllm_config, settings))
        self.slots = SlotState(
            slots=self.max_num_reqs,
            length=self.block_length,
            mask_token=vllm_config.model_config.hf_config.mask_token_id,
            parameters=self.algorithm.parameters,
            device=device,
        )

    def custom_sampler(self, sampler: Any) -> tuple[DiffusionSampler, None]:
        """Our sampler in place of vLLM's; a diffusion model has no rejection sampler."""
        return DiffusionSampler(
            req_states=sampler.req_states,
            slots=self.slots,
            algorithm=self.algorithm,
            head=self.model.head,
            defaults=self.defaults,
        ), None

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        """A new (or resumed) request takes a slot; a resumed one brings its output as prompt."""
        self.slots.start(req_index, new_req_data.prefill_token_ids)

    def prepare_inputs_embeds(
        self, scheduled_encoder_inputs: Any, input_batch: Any, req_states: Any
    ) -> None:
        """Token ids are all the input there is."""
        return None

    def prepare_inputs(self, input_batch: Any, req_states: Any) -> dict[str, Any]:
        """Nothing beside what the runner passes anyway."""
        return {}

    def prepare_dummy_inputs(self, num_reqs: int, num_tokens: int) -> dict[str, Any]:
        """Nothing beside what the runner passes anyway."""
        return {}

    def prepare_attn(
        self,
        input_batch: Any,
        cudagraph_mode: CUDAGraphMode,
        block_tables: tuple[torch.Tensor, ...],
        slot_mappings: torch.Tensor,
        attn_groups: Any,
        kv_cache_config: Any,
        for_capture: bool = False,
        ubatch_idx: int = 0,
    ) -> dict[str, Any]:
        """A canvas is one non-causal query; a prefill chunk is one for each of its blocks."""
        full = cudagraph_mode == CUDAGraphMode.FULL
        metadata = {
            "attn_groups": attn_groups,
            "kv_cache_config": kv_cache_config,
            "slot_mappings": slot_mappings,
            "max_seq_len": self.max_model_len,
            "num_tokens": input_batch.num_tokens_after_padding if full else input_batch.num_tokens,
            "positions": input_batch.positions,
            "for_cudagraph_capture": for_capture,
            "causal": False,
        }
        query_lengths = input_batch.num_scheduled_tokens
        drafts = input_batch.num_draft_tokens_per_req
        if full or (query_lengths <= self.block_length).all():
            # Each query lies inside one block: requests are segments as they are.
            rows = input_batch.num_reqs_after_padding if full else input_batch.num_reqs
            return build_attn_metadata(
                num_reqs=rows,
                query_start_loc_gpu=input_batch.query_start_loc[: rows + 1],
                query_start_loc_cpu=torch.from_numpy(input_batch.query_start_loc_np[: rows + 1]),
                max_query_len=input_batch.max_query_len or int(query_lengths.max()),
                seq_lens=input_batch.seq_lens,
                seq_lens_cpu_upper_bound=input_batch.seq_lens_cpu_upper_bound,
                block_tables=block_tables,
                **metadata,
            )
        whole = drafts > 0 if drafts is not None else query_lengths < 0
        segments = split_into_blocks(query_lengths, whole, self.block_length)
        row = torch.from_numpy(segments.row).to(self.device, non_blocking=True)
        cut = torch.from_numpy(segments.cut).to(self.device, non_blocking=True)
        start = torch.from_numpy(segments.start)
        bound = input_batch.seq_lens_cpu_upper_bound[torch.from_numpy(segments.row)]
        return build_attn_metadata(
            num_reqs=len(segments),
            query_start_loc_gpu=start.to(self.device, non_blocking=True),
            query_start_loc_cpu=start,
            max_query_len=segments.longest,
            seq_lens=input_batch.seq_lens[row] - cut,
            seq_lens_cpu_upper_bound=bound - torch.from_numpy(segments.cut),
            block_tables=tuple(table[row] for table in block_tables),
            **metadata,
        )
