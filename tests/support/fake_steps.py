"""Admissions and steps of models at their published sizes, on the fake accelerator.

What runs is this package's code between two forward passes: the model state's `add_request`, the
input embeddings' self-conditioning, the attention metadata's own part, and the sampler with its
readout. The backbone is left out. Use it inside `fake_accelerator`.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.nn.functional import linear
from vllm import SamplingParams

from tests.support.fake_accelerator import Cost, fake_accelerator
from vllm_dllm.families.diffusion_gemma.self_conditioning import SelfConditioning
from vllm_dllm.ops.statistics.head import Head, logits_of
from vllm_dllm.settings.request import RequestOptions
from vllm_dllm.settings.resolution import Served
from vllm_dllm.settings.resolved import AUTOMATON, RESOLVED, ResolvedRequest
from vllm_dllm.settings.server import DllmSettings
from vllm_dllm.worker.logprobs import LogprobReports
from vllm_dllm.worker.model_state import DiffusionModelState
from vllm_dllm.worker.readout.dense import DenseReadout
from vllm_dllm.worker.readout.tiled import TiledReadout
from vllm_dllm.worker.sampler import DiffusionSampler
from vllm_dllm.worker.slots import CanvasKind, SlotState
from vllm_dllm.worker.step_plan import CommitPolicy

SEATS, POSITIONS, LLADA2_MASK = 64, 4096, 156_895


class FakeModel:
    """A model without its backbone: slots, readout, sampler, and a model state that admits."""

    def __init__(self, served: Served, kind: CanvasKind, hidden: int, device: torch.device) -> None:
        self.served, self.hidden, self.device = served, hidden, device
        self.slots = SlotState(SEATS, kind, device)
        self.reports = LogprobReports(self.slots, "raw_logprobs")
        masked = kind.mask_token is not None
        self.weight = torch.empty(kind.vocabulary, hidden, dtype=torch.bfloat16, device=device)
        self.conditioning = None
        self.readout: Any
        if masked:
            self.readout = DenseReadout(self._logits, self.slots, self.reports)
        else:
            scale = torch.ones((), dtype=torch.bfloat16, device=device)
            self.conditioning = SelfConditioning(self.slots, hidden, torch.add, scale)
            self.readout = TiledReadout(self._head(kind), self.slots, self.reports)
        self.states = SimpleNamespace(
            all_token_ids=SimpleNamespace(gpu=self._zeros(torch.int32, SEATS, POSITIONS)),
            draft_tokens=self._zeros(torch.int64, SEATS, kind.length),
        )
        policy = CommitPolicy(False, True, True, in_place=masked)
        self.sampler = DiffusionSampler(
            self.states, self.slots, policy, self.readout, self.reports, self.conditioning
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
        state.slots, state.reports, state.served = self.slots, self.reports, self.served
        conditioning = self.conditioning
        state.embeddings = conditioning and SimpleNamespace(conditioning=conditioning)
        state.model_config = SimpleNamespace(max_model_len=POSITIONS)
        state.model_seed, state.sees_logits = 0, True
        state.slot_of, state.interrupted = {}, {}
        return state

    def admit(
        self,
        slot: int,
        automaton: bytes | None = None,
        options: RequestOptions | None = None,
        bad_words: list[list[int]] | None = None,
        **params: Any,
    ) -> None:
        """Admit a request of 37 prompt tokens to a slot.

        Args:
            slot: where it goes.
            automaton: the packed automaton of its constraint, or None.
            options: its diffusion options.
            bad_words: token ids that it may not use.
            params: vLLM's sampling parameters; greedy for a masked model unless they say otherwise.
        """
        greedy = {"temperature": 0.0 if self.slots.kind.mask_token is not None else 1.0}
        asked = SamplingParams(max_tokens=512, **(greedy | params))
        asked._bad_words_token_ids = bad_words
        asked._all_stop_token_ids = {3, 4}
        options = options or RequestOptions()
        resolved = ResolvedRequest.of(self.served.choose(options), options)
        asked.extra_args = {RESOLVED: resolved, AUTOMATON: automaton}
        prompt = list(range(100, 137))
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

    def measured(self, case: dict[str, Any]) -> dict[str, Any]:
        """The costs of one admission and of one step, see `main`; greedy unless it says more."""
        canvases, beside = case["canvases"], case.get("beside", {})
        with Cost() as admission:
            self.admit(0, **case.get("request", {}))
        for slot in range(canvases + beside.get("prefills", 0)):
            self.admit(slot, **case.get("request", {}))
        with Cost() as step:
            self.step(canvases, **beside)
        return {"admission": admission.summary(), "step": step.summary()}

    def step(self, canvases: int, prefills: int = 0, narrow: int = 0) -> None:
        """One step: the slots from 0 on hold canvases, those behind them prefill.

        Args:
            canvases: number of canvases.
            prefills: number of prefill chunks beside them, which end their prompts.
            narrow: how many positions the last canvas lacks.
        """
        batch = self.batch(canvases, prefills, narrow)
        if self.conditioning is not None and canvases:
            shape = batch.num_tokens, self.hidden
            embeddings = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
            self.conditioning.apply(embeddings, batch)
        shape = batch.num_draft_tokens, self.hidden
        self.sampler(torch.empty(shape, dtype=torch.bfloat16, device=self.device), batch)

    def batch(self, canvases: int, prefills: int = 0, narrow: int = 0) -> Any:
        """What is read of vLLM's ``InputBatch``; the arguments are those of `step`."""
        rows, length, chunk = canvases + prefills, self.slots.length, 100
        widths = np.array([length] * canvases + [0] * prefills)
        widths[canvases - 1] -= narrow
        scheduled = widths + np.array([0] * canvases + [chunk] * prefills)
        starts = np.concatenate([[0], np.cumsum(scheduled)])
        return SimpleNamespace(
            num_reqs=rows,
            num_reqs_after_padding=rows,
            idx_mapping=torch.empty(rows, dtype=torch.int32, device=self.device),
            idx_mapping_np=np.arange(rows),
            num_tokens=int(scheduled.sum()),
            num_draft_tokens=int(widths.sum()),
            num_draft_tokens_per_req=widths,
            cu_num_logits_np=np.concatenate([[0], np.cumsum(widths)]),
            num_scheduled_tokens=scheduled,
            query_start_loc_np=starts,
            num_computed_prefill_tokens_np=np.array([37] * canvases + [0] * prefills),
            prefill_len_np=np.array([37] * canvases + [chunk] * prefills),
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


def main() -> None:
    """Print what each case costs, a line for each.

    A case is an object with the keys ``model`` (one of `MODELS`), ``canvases`` (how many), and
    possibly ``request`` (arguments of `FakeModel.admit`) and ``beside`` (more arguments of
    `FakeModel.step`).
    """
    for case in json.loads(sys.argv[1]):
        with fake_accelerator() as device:
            print(json.dumps(MODELS[case["model"]](device).measured(case)))


if __name__ == "__main__":
    main()
