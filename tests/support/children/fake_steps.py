"""Admissions and steps of models at their published sizes, on the fake accelerator.

What runs is this package's code between two forward passes: the model state's `add_request`, the
input embeddings' self-conditioning, the attention metadata's own part, and the sampler with its
readout. The backbone is left out. Use it inside `fake_accelerator`.

Steps run as on a GPU by default: with Triton kernels, each counted as one kernel, and compiled
functions, counted as the kernels that PyTorch's compiler generates; see `Launches`.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import islice, product
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from canvas_grammar.automaton.compilation import Constraint, compile_constraint
from canvas_grammar.automaton.vocabulary import Vocabulary
from canvas_grammar.limits import CompileLimits
from torch.nn.functional import linear
from vllm import SamplingParams

from tests.support.fake_accelerator import Cost, FakeDevice, fake_accelerator
from tests.support.generated_kernels import generated_kernels
from vllm_dllm.attention.metadata import AttentionBatch
from vllm_dllm.engine import readout_masked, readout_noise, step, token_choice
from vllm_dllm.engine.model_state import DiffusionModelState, read_again
from vllm_dllm.engine.optional_parts import OptionalParts
from vllm_dllm.engine.readout_masked import MaskedReadout
from vllm_dllm.engine.readout_noise import NoiseReadout
from vllm_dllm.engine.readout_triton import MaskedKernels
from vllm_dllm.engine.sampler import DiffusionSampler
from vllm_dllm.engine.slots import CanvasKind, SlotState
from vllm_dllm.engine.step import CommitPolicy
from vllm_dllm.families.block_causal.attention import BlockCausal
from vllm_dllm.families.diffusion_gemma.attention import CausalUnlessDenoised
from vllm_dllm.families.diffusion_gemma.self_conditioning import SelfConditioning
from vllm_dllm.ops.compiled import OF_BATCHES, OF_ROWS
from vllm_dllm.ops.statistics import rows_triton, soft_embedding_triton, tiled
from vllm_dllm.ops.statistics.head import Head, logits_of
from vllm_dllm.ops.statistics.soft_embedding_triton import fused_statistics
from vllm_dllm.ops.statistics.tiled import tiled_statistics
from vllm_dllm.settings.resolution import AUTOMATON, RESOLVED, ResolvedRequest, Served
from vllm_dllm.settings.server import DllmSettings

SEATS, POSITIONS, PROMPT = 64, 4096, 37


class FakeModel:
    """A model without its backbone: slots, readout, sampler, and a model state that admits."""

    def __init__(
        self,
        served: Served,
        kind: CanvasKind,
        hidden: int,
        device: torch.device,
        on_gpu: bool = False,
    ) -> None:
        """Set up with torch's operators, or with what runs on a GPU if `on_gpu` is true."""
        self.served, self.hidden, self.device = served, hidden, device
        self.slots = SlotState(SEATS, kind, device)
        self.parts = OptionalParts(self.slots, "raw_logprobs")
        masked = kind.mask_token is not None
        self.weight = torch.empty(kind.vocabulary, hidden, dtype=torch.bfloat16, device=device)
        self.conditioning = None
        self.readout: Any
        self.attention: Any
        common = self.slots, self.parts, on_gpu
        if masked:
            kernels = MaskedKernels(self._head(kind, None)) if on_gpu else None
            self.readout = MaskedReadout(self._logits, *common, kernels)
            self.attention = BlockCausal(kind.length, device)
        else:
            scale = torch.ones((), dtype=torch.bfloat16, device=device)
            self.conditioning = SelfConditioning(self.slots, hidden, torch.add, scale)
            statistics = fused_statistics if on_gpu else tiled_statistics
            self.readout = NoiseReadout(self._head(kind, 30.0), *common, statistics)
            self.attention = CausalUnlessDenoised(self.slots)
        self.states = SimpleNamespace(
            all_token_ids=SimpleNamespace(gpu=self._zeros(torch.int32, SEATS, POSITIONS)),
            draft_tokens=self._zeros(torch.int64, SEATS, kind.length),
        )
        policy = CommitPolicy(False, True, True, in_place=masked)
        self.sampler = DiffusionSampler(
            self.states, self.slots, policy, self.readout, self.parts, self.conditioning
        )
        if on_gpu:
            self.sampler.canvas_update.compiled_algorithm = served.choose().algorithm.name
        self.admission = self._model_state()

    def _zeros(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return linear(hidden, self.weight)

    def _head(self, kind: CanvasKind, cap: float | None) -> Head:
        logits = logits_of(self.weight, 0, cap)
        return Head(logits, kind.vocabulary, self.weight, None, weight=self.weight, soft_cap=cap)

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
        if "logit_bias" in params:  # JSON's keys are strings
            params["logit_bias"] = {int(id): bias for id, bias in params["logit_bias"].items()}
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


@dataclass(frozen=True)
class Published:
    """A published model's sizes, and how it is served.

    Attributes:
        served: how it is served.
        kind: its canvases.
        hidden: its width.
    """

    served: Served
    kind: CanvasKind
    hidden: int

    def fake(self, device: torch.device, on_gpu: bool = True) -> FakeModel:
        """The model on a fake device."""
        return FakeModel(self.served, self.kind, self.hidden, device, on_gpu)

    def small(self) -> FakeModel:
        """A model of few ids on the CPU, whose canvases have the published length."""
        vocabulary, mask = 320, self.kind.mask_token
        kind = replace(
            self.kind, vocabulary=vocabulary, mask_token=None if mask is None else vocabulary - 1
        )
        model = FakeModel(self.served, kind, 64, torch.device("cpu"), on_gpu=True)
        model.weight.zero_()
        return model


def masked(algorithm: str, length: int, vocabulary: int, hidden: int) -> Published:
    served = Served("mask", algorithm, DllmSettings(), {}, length, None, vocabulary - 1)
    return Published(served, CanvasKind(length, vocabulary, vocabulary - 1, aligned=True), hidden)


MODELS = {
    "LLaDA2.0-mini": masked("LowConfidence", 32, 157_184, 2048),
    "SDAR-1.7B": masked("LowConfidenceDynamic", 4, 151_936, 2048),
    # Its logits are soft-capped.
    "DiffusionGemma": Published(
        Served("uniform", "EntropyBound", DllmSettings(), {}, 256, None, None),
        CanvasKind(256, 262_144, None, aligned=False),
        2816,
    ),
}
# The modules of Triton kernels, and those that compile functions.
KERNELS = (rows_triton, soft_embedding_triton)
COMPILING = (step, token_choice, readout_masked, readout_noise, soft_embedding_triton, tiled)


class Launches:
    """Stands in for Triton kernels and compiled functions while it is entered.

    Attributes:
        counts: number of launches of each Triton kernel.
        generated: number of kernels of each compiled function, by its name.
    """

    def __init__(self, generated: Mapping[str, int] | None = None) -> None:
        """Count with these numbers, or find them out, which runs every compiled function."""
        self.counts: Counter[str] = Counter()
        self.finds_out = generated is None
        self.generated: dict[str, int] = dict(generated or {})
        self.stack = ExitStack()

    def __enter__(self) -> Launches:
        for module in KERNELS:
            for name in [name for name in vars(module) if name.endswith("_kernel")]:
                self._patch(module, name, _Kernel(name, self.counts))
            self._patch(module, "empty", _zeros)
        for module in COMPILING:
            for name, how in (("compiled", OF_ROWS), ("compiled_for_batches", OF_BATCHES)):
                if hasattr(module, name):
                    self._patch(module, name, partial(self._compiled, how=how))
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def _patch(self, module: Any, name: str, stand_in: Any) -> None:
        self.stack.enter_context(mock.patch.object(module, name, stand_in))

    def _compiled(self, function: Callable[..., Any], how: Mapping[str, Any]) -> Callable[..., Any]:
        """What is called in place of a compiled function."""

        def run(*args: Any) -> Any:
            name = function.__name__
            if self.finds_out and name not in self.generated:
                self.generated[name] = len(generated_kernels(function, *args, **how))
            cost = FakeDevice.cost
            before = cost and cost.kernels.copy()
            result = function(*args)
            if cost is not None and before is not None:
                cost.kernels = before
                cost.kernels[f"compiled {name}"] += self.generated[name]
            return result

        return run


class _Kernel:
    """Stands in for a Triton kernel, which is launched and not run."""

    def __init__(self, name: str, counts: Counter[str]) -> None:
        self.name = name
        self.counts = counts

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *_, **__: self.counts.update([self.name])


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """In place of memory that a kernel would fill; it launches nothing."""
    made = torch.empty(tuple(shape), dtype=dtype, device=device)
    return made.zero_() if device.type == "cpu" else made


@cache
def generated(name: str) -> dict[str, int]:
    """The kernels of each function that is compiled for a model of `MODELS`."""
    with Launches() as found, torch.inference_mode():
        model = MODELS[name].small()
        model.sampler.canvas_update.compiles_ahead = True
        for temperature in (0.0, 0.7):
            for slot in range(2):
                model.admit(slot, temperature=temperature)
            batch = model.batch(2)
            batch.idx_mapping = torch.arange(2)  # which is left empty for a fake step
            model.sampler(torch.zeros(batch.num_draft_tokens, model.hidden).bfloat16(), batch)
    return found.generated


@cache
def automaton(vocabulary: int) -> bytes:
    """The packed automaton of up to 40 lower-case letters; most ids are words of four letters."""
    words = product(b"abcdefghijklmnopqrstuvwxyz", repeat=4)
    tokens = [b"", *(bytes([byte]) for byte in range(256))]
    tokens += map(bytes, islice(words, vocabulary - len(tokens)))
    known = Vocabulary.from_tokens(tokens, [0])
    letters = Constraint.from_value("regex", "[a-z]{1,40}")
    return compile_constraint(letters, known, CompileLimits()).packed


def measured(case: dict[str, Any]) -> dict[str, Any]:
    """The costs of the first request's admission and of one step, see `main`."""
    name = case["model"]
    with Launches(generated(name)) as launches, fake_accelerator() as device:
        model = MODELS[name].fake(device)
        requests, beside = case.get("requests", [{}]), case.get("beside", {})
        with Cost() as admission:
            model.admit(0, **requests[0])
        for slot in range(case["canvases"] + beside.get("prefills", 0)):
            model.admit(slot, **requests[slot % len(requests)])
        batch = model.batch(case["canvases"], **beside)
        launches.counts.clear()
        with Cost() as step:
            model.step(batch)
        step.kernels.update(launches.counts)
    return {"admission": admission.summary(), "step": step.summary()}


def main() -> None:
    """Print what each case costs, a line for each.

    A case is an object with the keys ``model`` (one of `MODELS`), ``canvases`` (how many), and
    possibly ``requests`` (the arguments of `FakeModel.admit` for each, from the start again where
    there are more canvases), and ``beside`` (more arguments of `FakeModel.batch`).
    """
    for case in json.loads(sys.argv[1]):
        print(json.dumps(measured(case)), flush=True)


if __name__ == "__main__":
    main()
