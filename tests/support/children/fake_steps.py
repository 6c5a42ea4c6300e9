"""Admissions and steps of models at their published sizes, on the fake accelerator.

What runs is this package's code between two forward passes: the model state's `add_request`, the
input embeddings' self-conditioning, the attention metadata's own part, and the sampler with its
readout. The backbone is left out. Use it inside `fake_accelerator`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import cache
from itertools import islice, product
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from canvas_grammar.automaton.compilation import Constraint, compile_constraint
from canvas_grammar.automaton.vocabulary import Vocabulary
from canvas_grammar.limits import CompileLimits
from torch.nn.functional import linear
from vllm import SamplingParams

from tests.support.fake_accelerator import Cost, fake_accelerator
from vllm_dllm.attention.metadata import AttentionBatch
from vllm_dllm.engine.model_state import DiffusionModelState, read_again
from vllm_dllm.engine.optional_parts import OptionalParts
from vllm_dllm.engine.readout_masked import MaskedReadout
from vllm_dllm.engine.readout_noise import NoiseReadout
from vllm_dllm.engine.sampler import DiffusionSampler
from vllm_dllm.engine.slots import CanvasKind, SlotState
from vllm_dllm.engine.step import CommitPolicy
from vllm_dllm.families.block_causal.attention import BlockCausal
from vllm_dllm.families.diffusion_gemma.attention import CausalUnlessDenoised
from vllm_dllm.families.diffusion_gemma.self_conditioning import SelfConditioning
from vllm_dllm.ops.statistics.head import Head, logits_of
from vllm_dllm.ops.statistics.rows import SampledStatistics
from vllm_dllm.ops.statistics.tiled import Result
from vllm_dllm.settings.resolution import AUTOMATON, RESOLVED, ResolvedRequest, Served
from vllm_dllm.settings.server import DllmSettings

SEATS, POSITIONS, PROMPT, LLADA2_MASK = 64, 4096, 37, 156_895


class FakeModel:
    """A model without its backbone: slots, readout, sampler, and a model state that admits."""

    def __init__(self, served: Served, kind: CanvasKind, hidden: int, device: torch.device) -> None:
        self.served, self.hidden, self.device = served, hidden, device
        self.slots = SlotState(SEATS, kind, device)
        self.parts = OptionalParts(self.slots, "raw_logprobs")
        masked = kind.mask_token is not None
        self.weight = torch.empty(kind.vocabulary, hidden, dtype=torch.bfloat16, device=device)
        self.conditioning = None
        self.readout: Any
        self.attention: Any
        if masked:
            self.readout = MaskedReadout(self._logits, self.slots, self.parts)
            self.attention = BlockCausal(kind.length, device)
        else:
            scale = torch.ones((), dtype=torch.bfloat16, device=device)
            self.conditioning = SelfConditioning(self.slots, hidden, torch.add, scale)
            self.readout = NoiseReadout(self._head(kind), self.slots, self.parts)
            self.attention = CausalUnlessDenoised(self.slots)
        self.states = SimpleNamespace(
            all_token_ids=SimpleNamespace(gpu=self._zeros(torch.int32, SEATS, POSITIONS)),
            draft_tokens=self._zeros(torch.int64, SEATS, kind.length),
        )
        policy = CommitPolicy(False, True, True, in_place=masked)
        self.sampler = DiffusionSampler(
            self.states, self.slots, policy, self.readout, self.parts, self.conditioning
        )
        self.admission = self._model_state()

    def _zeros(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return linear(hidden, self.weight)

    def _head(self, kind: CanvasKind) -> Head:
        logits = logits_of(self.weight, 0, 30.0)
        return Head(logits, kind.vocabulary, self.weight, None, weight=self.weight, soft_cap=30.0)

    def _model_state(self) -> DiffusionModelState:
        """A model state that admits requests, without vLLM's configuration."""
        state = DiffusionModelState.__new__(DiffusionModelState)
        state.slots, state.parts, state.served = self.slots, self.parts, self.served
        conditioning = self.conditioning
        state.embeddings = conditioning and SimpleNamespace(conditioning=conditioning)
        state.model_config = SimpleNamespace(max_model_len=POSITIONS)
        state.model_seed, state.sees_logits = 0, True
        state.slot_of, state.interrupted = {}, {}
        return state

    def admit(
        self,
        slot: int,
        constrained: bool = False,
        options: dict[str, Any] | None = None,
        banned: Sequence[int] = (),
        **params: Any,
    ) -> None:
        """Admit a request to a slot.

        Args:
            slot: where it goes.
            constrained: whether its output follows an automaton.
            options: its options, by name.
            banned: token ids that it may not use.
            params: vLLM's sampling parameters; greedy for a masked model unless they say otherwise.
        """
        greedy = {"temperature": 0.0 if self.slots.kind.mask_token is not None else 1.0}
        asked = SamplingParams(max_tokens=512, **(greedy | params))
        asked._bad_words_token_ids = [[word] for word in banned]
        asked._all_stop_token_ids = {3, 4}
        packed = automaton(self.slots.kind.vocabulary) if constrained else None
        resolved = ResolvedRequest.of(self.served.choose(options), options)
        asked.extra_args = {RESOLVED: resolved, AUTOMATON: packed}
        prompt = list(range(100, 100 + PROMPT))
        self.admission.slot_of.clear()
        self.admission._take_up(
            slot,
            SimpleNamespace(
                req_id=f"r{slot}",
                prompt_token_ids=prompt,
                prefill_token_ids=prompt,
                sampling_params=asked,
            ),
        )

    def step(self, batch: Any) -> None:
        """One step over a batch from `batch`: all that this package does but the forward pass."""
        drafts = batch.num_draft_tokens_per_req
        if ((batch.num_scheduled_tokens > drafts) & (drafts > 0)).any():
            read_again(batch, self.states.all_token_ids.gpu)
        if self.conditioning is not None:
            self.conditioning.apply(self._hidden(batch.num_tokens), batch)
        nowhere = {"attn_groups": [], "kv_cache_config": SimpleNamespace(kv_cache_groups=[])}
        common = nowhere | {"slot_mappings": None, "num_tokens": batch.num_tokens}
        common |= {"max_seq_len": POSITIONS, "for_cudagraph_capture": False}
        self.attention.metadata(AttentionBatch(batch, False, (), common))
        self.sampler(self._hidden(batch.num_draft_tokens), batch)

    def _hidden(self, rows: int) -> torch.Tensor:
        return torch.empty((rows, self.hidden), dtype=torch.bfloat16, device=self.device)

    def batch(self, canvases: int, prefills: int = 0, narrow: int = 0, committing: int = 0) -> Any:
        """What is read of vLLM's ``InputBatch``; the slots behind the canvases prefill.

        Args:
            canvases: number of canvases.
            prefills: number of prefill chunks beside them, which end their prompts.
            narrow: how many positions the last canvas lacks.
            committing: how many canvases are read together with the block before them.
        """
        rows, length, chunk = canvases + prefills, self.slots.length, 100
        widths = np.array([length] * canvases + [0] * prefills)
        widths[canvases - 1] -= narrow
        scheduled = widths + np.array([0] * canvases + [chunk] * prefills)
        scheduled[:committing] += length
        starts = np.concatenate([[0], np.cumsum(scheduled)]).astype(np.int32)
        tokens = int(scheduled.sum())
        return SimpleNamespace(
            num_reqs=rows,
            idx_mapping=self._zeros(torch.int32, rows),
            idx_mapping_np=np.arange(rows),
            num_tokens=tokens,
            num_draft_tokens=int(widths.sum()),
            num_draft_tokens_per_req=widths,
            cu_num_logits_np=np.concatenate([[0], np.cumsum(widths)]),
            num_scheduled_tokens=scheduled,
            query_start_loc=self._zeros(torch.int32, rows + 1),
            query_start_loc_np=starts,
            max_query_len=int(scheduled.max()),
            seq_lens=self._zeros(torch.int32, rows),
            seq_lens_cpu_upper_bound=torch.zeros(rows, dtype=torch.int32),
            input_ids=self._zeros(torch.int32, tokens),
            positions=self._zeros(torch.int64, tokens),
            num_computed_prefill_tokens_np=np.array([PROMPT] * canvases + [0] * prefills),
            prefill_len_np=np.array([PROMPT] * canvases + [chunk] * prefills),
        )


def llada2_mini(device: torch.device) -> FakeModel:
    """LLaDA2.0-mini: canvases of 32 positions, 157,184 ids."""
    served = Served("mask", "LowConfidence", DllmSettings(), {}, 32, None, LLADA2_MASK)
    return FakeModel(served, CanvasKind(32, 157_184, LLADA2_MASK, aligned=True), 2048, device)


def diffusion_gemma(device: torch.device) -> FakeModel:
    """DiffusionGemma: canvases of 256 positions, 262,144 ids, soft-capped logits."""
    served = Served("uniform", "EntropyBound", DllmSettings(), {}, 256, None, None)
    return FakeModel(served, CanvasKind(256, 262_144, None, aligned=False), 2816, device)


MODELS = {"llada2": llada2_mini, "gemma": diffusion_gemma}


@cache
def automaton(vocabulary: int) -> bytes:
    """The packed automaton of up to 40 lower-case letters; most ids are words of four letters."""
    words = product(b"abcdefghijklmnopqrstuvwxyz", repeat=4)
    tokens = [b"", *(bytes([byte]) for byte in range(256))]
    tokens += map(bytes, islice(words, vocabulary - len(tokens)))
    known = Vocabulary.from_tokens(tokens, [0])
    letters = Constraint.from_value("regex", "[a-z]{1,40}")
    return compile_constraint(letters, known, CompileLimits()).packed


def no_head(hidden: torch.Tensor, head: Head, temperature: torch.Tensor, *_: Any) -> Result:
    """In place of `tiled_statistics`, for cases in which the head does not matter."""
    statistics = SampledStatistics(*(torch.zeros_like(temperature) for _ in range(5)))
    soft = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    return statistics, soft


def measured(case: dict[str, Any]) -> dict[str, Any]:
    """The costs of the first request's admission and of one step, see `main`."""
    with fake_accelerator() as device:
        model = MODELS[case["model"]](device)
        if not case.get("head", True):
            model.readout.statistics = no_head
        requests, beside = case.get("requests", [{}]), case.get("beside", {})
        with Cost() as admission:
            model.admit(0, **requests[0])
        for slot in range(case["canvases"] + beside.get("prefills", 0)):
            model.admit(slot, **requests[slot % len(requests)])
        batch = model.batch(case["canvases"], **beside)
        with Cost() as step:
            model.step(batch)
    return {"admission": admission.summary(), "step": step.summary()}


def main() -> None:
    """Print what each case costs, a line for each.

    A case is an object with the keys ``model`` (one of `MODELS`), ``canvases`` (how many), and
    possibly ``requests`` (the arguments of `FakeModel.admit` for each, from the start again where
    there are more canvases), ``beside`` (more arguments of `FakeModel.batch`), and ``head`` (false
    to leave out the head of DiffusionGemma, which is quicker).
    """
    for case in json.loads(sys.argv[1]):
        print(json.dumps(measured(case)), flush=True)


if __name__ == "__main__":
    main()
