"""The model state of a block-diffusion model; vLLM's runner calls it before each forward pass."""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.logger import init_logger
from vllm.v1.worker.gpu.model_states.interface import ModelState

from vllm_dllm.attention.metadata import AttentionBatch, AttentionRule
from vllm_dllm.attention.served_route import has_own_backend
from vllm_dllm.engine.contracts import CommitPolicy
from vllm_dllm.engine.further_passes import FurtherPasses, PreparedStep, most_passes, replays
from vllm_dllm.engine.input_ids import read_again, read_canvases
from vllm_dllm.engine.optional_parts import OptionalParts
from vllm_dllm.engine.readout import compiles, make_readout
from vllm_dllm.engine.sampler import DiffusionSampler
from vllm_dllm.engine.sleep import keep_asleep
from vllm_dllm.engine.slots import CanvasKind, SlotState
from vllm_dllm.settings.resolution import (
    AUTOMATON,
    GREEDY_EPSILON,
    RESOLVED,
    ResolvedRequest,
    Served,
    StepDetails,
)
from vllm_dllm.vllm_seams.channels import Failure
from vllm_dllm.vllm_seams.runner import allocate_no_grammar_bitmask, report_preemptions

if TYPE_CHECKING:
    from vllm_dllm.engine.interrupted import InterruptedCanvas
    from vllm_dllm.engine.replayed_passes import ReplayedPasses
    from vllm_dllm.engine.spoiled_pages import Pages

logger = init_logger("vllm.dllm")


class DiffusionModelState(ModelState):
    """Owns the slots; prepares attention metadata and embeddings for the backbone.

    Whatever differs between models is in their family. To vLLM a canvas is L draft tokens that are
    either all rejected (denoise) or all accepted (commit), without a bonus token.
    """

    num_new_sampled_tokens_per_step = 0

    def __init__(
        self,
        vllm_config: VllmConfig,
        model: nn.Module,
        encoder_cache: Any,
        device: torch.device,
        family: Any,
        kind: CanvasKind,
        policy: CommitPolicy,
    ) -> None:
        """The first four arguments are vLLM's; `families.model_state` adds the others.

        `family` is a `families.base.Family`, which this room does not import.
        """
        super().__init__(vllm_config, model, encoder_cache, device)
        self.served: Served = vllm_config.model_config.dllm
        self.policy = policy
        self.slots = SlotState(self.max_num_reqs, kind, device)
        alone = vllm_config.parallel_config.world_size == 1
        self.parts = OptionalParts(self.slots, self.model_config.logprobs_mode, alone)
        if self.served.two_blocks:
            from vllm_dllm.engine.two_block_window import TwoBlockWindow

            self.parts.window = TwoBlockWindow(self.slots, self.max_model_len)
        rule = self.served.settings.threshold_under_load
        if rule is not None:
            from vllm_dllm.engine.load_threshold import LoadThreshold

            self.parts.under_load = LoadThreshold(rule, self.slots)
        # The requests of vLLM's GPU warm-up lack what admission adds.
        self.unadmitted = {RESOLVED: ResolvedRequest.of(self.served.choose())}
        own = has_own_backend(vllm_config)
        self.attention: AttentionRule = family.attention(self.served, self.slots, own)
        self.embeddings = family.embeddings(self)
        self.readout = make_readout(
            self.model, self.slots, self.parts, vllm_config, self.served.settings.kernels
        )
        self.to_compile = compiles(vllm_config)
        self.model_seed = self.model_config.seed
        self.slot_of: dict[str, int] = {}
        # Canvases of preempted requests that stream, by request id, until the requests come back.
        self.interrupted: dict[str, InterruptedCanvas] = {}
        self.unclean: set[str] = set()
        self.graphs: Any = None  # the runner's CUDA graphs, see `report_preemptions`
        report_preemptions()
        allocate_no_grammar_bitmask()
        self.sampler: DiffusionSampler | None = None
        # Becomes True where vLLM makes a sampler: on every rank of the last pipeline stage.
        self.sees_logits = False

    def custom_sampler(self, sampler: Any) -> tuple[DiffusionSampler, None]:
        """Return this package's sampler in place of vLLM's; there is no rejection sampler."""
        self.sees_logits = True
        self.total_len = sampler.req_states.total_len.gpu
        self.sampler = DiffusionSampler(
            req_states=sampler.req_states,
            slots=self.slots,
            policy=self.policy,
            readout=self.readout,
            parts=self.parts,
            predictions=None if self.embeddings is None else self.embeddings.conditioning,
            prepare=self.prepare,
            has_stages=self.vllm_config.parallel_config.pipeline_parallel_size > 1,
            further=self._further_passes(sampler.req_states),
        )
        return self.sampler, None

    def _further_passes(self, req_states: Any) -> FurtherPasses | ReplayedPasses | None:
        """What takes more than one pass in a step, if it may."""
        most = most_passes(self.vllm_config, self.served, self.slots.device)
        if most == 1:
            return None
        if not replays(self.vllm_config):
            return FurtherPasses(self, req_states, most)
        from vllm_dllm.engine.replayed_passes import ReplayedPasses

        return ReplayedPasses(self, req_states, most)

    def prepare(self) -> None:
        """Prepare for requests while vLLM measures how much memory a step uses."""
        from vllm_dllm.engine.warm_up import read_largest_batch

        self._compile()
        read_largest_batch(self)

    def _compile(self) -> None:
        """Compile what runs after the model, unless it has been compiled already.

        While the model is loaded it is too early: compiled functions depend on the number of
        threads, which vLLM's GPU worker changes afterwards.
        """
        if self.to_compile:
            from vllm_dllm.engine.warm_up import compile_sampler

            self.to_compile = False
            compile_sampler(self)

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        """Set up the slot of a new or resumed request; a resumed one has its output in its prompt.

        If a request that cannot be set up has passed admission, it ends with an error, and no other
        request is affected; with several ranks the engine ends.
        """
        self.slot_of[new_req_data.req_id] = req_index
        try:
            self._take_up(req_index, new_req_data)
        except Exception:
            logger.exception("dllm: request %s could not be admitted", new_req_data.req_id)
            self.end_if_not_alone()
            self.slots.enter(req_index, new_req_data.prefill_token_ids, seed=0)
            self.slots.configure(req_index, self.served.choose(), 0.0, tokens=1)
            self.parts.leave(req_index)
            self.slots.failure[req_index].fill_(int(Failure.NOT_TAKEN_UP))

    def end_if_not_alone(self) -> None:
        """End this process, and so the engine, if other ranks go on as if nothing had failed.

        vLLM would wait for the first rank, which may wait for this one in a collective.
        """
        if self.vllm_config.parallel_config.world_size > 1:
            raise SystemExit("dllm: one of several ranks has failed, see the log above")

    def _take_up(self, req_index: int, new_req_data: Any) -> None:
        params, prompt = new_req_data.sampling_params, new_req_data.prefill_token_ids
        seed = self._default_seed(new_req_data) if params.seed is None else params.seed
        extra: dict[str, Any] = params.extra_args or self.unadmitted
        resolved = ResolvedRequest.received(extra)
        choice = resolved.decoding(self.served.corruption)
        verifies = choice.algorithm.verifies
        self.slots.enter(req_index, prompt, seed, reread=int(verifies))
        if self.embeddings is not None:
            self.embeddings.clear(req_index)
        prompt_length = len(new_req_data.prompt_token_ids)
        is_new = len(prompt) == prompt_length
        # The scheduler ends a request at the same token.
        room = self.max_model_len - prompt_length
        limit = room if params.max_tokens is None else min(params.max_tokens, room)
        ends = set(params.stop_token_ids or ())
        if params.eos_token_id is not None:
            ends.add(params.eos_token_id)
        self.slots.configure(
            req_index,
            choice,
            params.temperature,
            limit - (len(prompt) - prompt_length),
            ends,
            read_only=resolved.read_only,
            streams=resolved.stream_prefix,
            records=bool(resolved.step_details),
            # A draft is verified to its end, whatever it says.
            whole=verifies or bool(resolved.step_details & StepDetails.REPLAY),
        )
        if self.parts.under_load is not None:
            self.parts.under_load.enter(req_index, resolved.follows_load)
        if is_new and resolved.seed_canvas is not None:
            self.slots.seed_canvas(req_index, resolved.seed_canvas, resolved.pinned)
        packed = extra.get(AUTOMATON) if self.sees_logits else None
        output = prompt[prompt_length:]
        self.parts.enter(req_index, params, resolved, choice, prompt_length, packed, output)
        interrupted = self.interrupted.pop(new_req_data.req_id, None)
        if interrupted is not None:
            interrupted.resume(self.parts, req_index, prompt, prompt_length)
        if self.parts.window is not None:
            self.parts.window.enter(req_index, prompt)

    def preempt_requests(self, scheduler_output: Any) -> None:
        """Keep the canvases of preempted requests that `add_request` could not restore."""
        preempted = scheduler_output.preempted_req_ids or ()
        self.unclean = {*preempted, *getattr(scheduler_output, "dllm_unclean", ())}
        for req_id in preempted:
            slot = self.slot_of.get(req_id)
            # A rank that sees no logits does not know a canvas' progress and does not need to.
            if slot is not None and self.sees_logits and self.slots.may_stream[slot]:
                from vllm_dllm.engine.interrupted import InterruptedCanvas

                self.interrupted[req_id] = InterruptedCanvas.copy(self.parts, slot, self.total_len)
        if self.interrupted:  # a request may end while it is preempted
            for req_id in scheduler_output.finished_req_ids:
                self.interrupted.pop(req_id, None)

    def _default_seed(self, new_req_data: Any) -> int:
        """The seed of a request that sets none: an int64, the same on all ranks.

        Greedy answers must be repeatable although a canvas may begin with random tokens, so their
        seed comes from the prompt. Other requests must differ, so their seeds come from their ids.
        """
        text = f"{self.model_seed} {new_req_data.req_id}".encode()
        if new_req_data.sampling_params.temperature < GREEDY_EPSILON:
            if self.slots.kind.mask_token is not None:
                return 0  # nothing is drawn, and a long prompt takes milliseconds
            # Use the original prompt: a resumed request's prompt also holds its output so far,
            # which would change the seed.
            prompt = np.asarray(new_req_data.prompt_token_ids, dtype=np.int64)
            text = f"{self.model_seed} ".encode() + prompt.tobytes()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), signed=True)

    def initialize_kv_cache(self, kv_cache_config: Any, block_tables: Any) -> None:
        """Record where the pages of the KV cache are, and keep the state of slots when vLLM sleeps.

        If vLLM does not profile (a CPU with ``VLLM_CPU_CI_ENV``), the sampler is compiled here.
        """
        if self.sampler is not None:
            self._compile()
        keep_asleep(self.model, self)
        if self.parts.window is not None:  # vLLM has fitted the length into memory by now
            self.parts.window.context = self.max_model_len
        self.block_tables, self.kv_cache_groups = block_tables, kv_cache_config.kv_cache_groups

    @cached_property
    def pages(self) -> Pages:
        """The pages of the KV cache, for the first request that has spoiled some."""
        from vllm_dllm.engine.spoiled_pages import Pages

        layers = self.vllm_config.compilation_config.static_forward_context
        return Pages(self.block_tables, self.kv_cache_groups, layers)

    def remove_request(self, req_id: str) -> None:
        """Free a request's slot, and clean its pages if it may have written NaN or infinities.

        An earlier pipeline stage never learns whether a canvas was sound. Another one waits for the
        device, which may still run a step with a request that was aborted.
        """
        slot = self.slot_of.pop(req_id, None)
        if slot is None:
            return
        self.parts.leave(slot)
        if req_id in self.unclean and (not self.sees_logits or self.slots.spoiled[slot]):
            self.pages.scrub(slot)

    def prepare_inputs_embeds(
        self, scheduled_encoder_inputs: Any, input_batch: Any, req_states: Any
    ) -> None:
        """Run the vision encoder on this step's images; `prepare_inputs` uses its output."""
        if self.embeddings is not None:
            self.embeddings.encode(scheduled_encoder_inputs, input_batch)

    def prepare_inputs(self, input_batch: Any, req_states: Any) -> dict[str, Any]:
        """The input embeddings of a model that reads pictures; empty for models that read ids."""
        # vLLM's pipeline stages drop the result of a prompt whose request may output only one
        # token, because in an ordinary model no pass follows. Here passes over a canvas follow.
        input_batch.max_seq_len_np = None
        if self.policy.granted:
            read_again(input_batch, req_states.all_token_ids.gpu)
        if self.slots.kind.shifted:
            read_canvases(input_batch, req_states.draft_tokens)
        return {} if self.embeddings is None else self.embeddings.fill(input_batch)

    def prepare_dummy_inputs(self, num_reqs: int, num_tokens: int) -> dict[str, Any]:
        """The same for profiling and graph capture."""
        return {} if self.embeddings is None else self.embeddings.dummy(num_tokens)

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
        """Return a step's attention metadata by layer name, as the family's rule builds it."""
        full = cudagraph_mode == CUDAGraphMode.FULL
        common = {
            "attn_groups": attn_groups,
            "kv_cache_config": kv_cache_config,
            "slot_mappings": slot_mappings,
            "num_tokens": input_batch.num_tokens_after_padding if full else input_batch.num_tokens,
            "positions": input_batch.positions,
            "for_cudagraph_capture": for_capture,
        }
        batch = AttentionBatch(input_batch, full, block_tables, common)
        # A captured graph must be valid for any length; otherwise the host knows an upper bound.
        common["max_seq_len"] = self.max_model_len if for_capture else batch.max_seq_len
        metadata = self.attention.metadata(batch)
        if not for_capture:
            given = input_batch, cudagraph_mode, block_tables, slot_mappings
            self.prepared = PreparedStep(*given, attn_groups, kv_cache_config, metadata)
        return metadata
