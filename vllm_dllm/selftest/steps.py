"""``vllm-dllm selftest --bench``: times of a step beside the model, at the published sizes.

A `BareModel` has what runs between two forward passes (slots, self-conditioning, head, sampler) and
random weights, so nothing has to be downloaded. On a GPU its steps launch what
``tests/serving/cuda_paths/step_costs.json`` counts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice, product
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch._C._autograd import DeviceType
from torch.nn.functional import linear
from torch.profiler import ProfilerActivity, profile
from vllm import SamplingParams

from vllm_dllm.engine.contracts import CommitPolicy
from vllm_dllm.engine.model_state import DiffusionModelState
from vllm_dllm.engine.optional_parts import OptionalParts
from vllm_dllm.engine.readout_masked import MaskedReadout
from vllm_dllm.engine.readout_noise import NoiseReadout
from vllm_dllm.engine.sampler import DiffusionSampler
from vllm_dllm.engine.slots import CanvasKind, Phase, SlotState
from vllm_dllm.engine.warm_up import compile_sampler
from vllm_dllm.families.diffusion_gemma.self_conditioning import SelfConditioning
from vllm_dllm.ops.statistics.head import Head, logits_of
from vllm_dllm.settings.resolution import AUTOMATON, RESOLVED, ResolvedRequest, Served
from vllm_dllm.settings.server import DllmSettings

Event = tuple[str, float, float]  # a name, its beginning and its end in microseconds
SEATS, POSITIONS, PROMPT = 64, 4096, 37
REQUESTS = (1, 4, 16)
WARM_STEPS, TIMED_STEPS = 4, 20


@dataclass(frozen=True)
class Published:
    """A published model: how it is served, its canvases, its width, and the cap of its logits."""

    served: Served
    kind: CanvasKind
    hidden: int
    soft_cap: float | None = None


def _masked(algorithm: str, length: int, vocabulary: int) -> Published:
    served = Served("mask", algorithm, DllmSettings(), {}, length, None, vocabulary - 1)
    return Published(served, CanvasKind(length, vocabulary, vocabulary - 1, aligned=True), 2048)


MODELS = {
    "LLaDA2.0-mini": _masked("LowConfidence", 32, 157_184),
    "SDAR-1.7B": _masked("LowConfidenceDynamic", 4, 151_936),
    "DiffusionGemma": Published(
        Served("uniform", "EntropyBound", DllmSettings(), {}, 256, None, None),
        CanvasKind(256, 262_144, None, aligned=False),
        2816,
        soft_cap=30.0,
    ),
}
# What the requests of a step ask for, by the names of the rows.
DRAWN: dict[str, Any] = {"temperature": 0.7}
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": DRAWN,
    "top_k and top_p": DRAWN | {"top_k": 50, "top_p": 0.9},
    "constrained": {"constrained": True},
    "constrained, drawn": DRAWN | {"constrained": True},
}
OF_NOISE = {"drawn": {}, "constrained": {"constrained": True}}


class BareModel:
    """A model without its backbone; its parts have the names that they have in an engine.

    `weight` is the head's, which is also the embedding, and `admission` a model state that admits
    requests, without vLLM's configuration.
    """

    def __init__(
        self, model: Published, device: torch.device, *, triton: bool, compile: bool
    ) -> None:
        self.served, self.hidden, kind = model.served, model.hidden, model.kind
        self.device = device
        self.slots = SlotState(SEATS, kind, device)
        self.parts = OptionalParts(self.slots, "raw_logprobs")
        self.weight = torch.empty(kind.vocabulary, self.hidden, dtype=torch.bfloat16, device=device)
        self.conditioning: SelfConditioning | None = None
        logits = logits_of(self.weight, model.soft_cap)
        head = Head(logits, kind.vocabulary, self.weight, None, self.weight, model.soft_cap)
        common = self.slots, self.parts, compile
        self.readout: MaskedReadout | NoiseReadout
        if kind.mask_token is not None:
            self.readout = MaskedReadout(self._logits, *common, head if triton else None)
        else:
            scale = torch.ones((), dtype=torch.bfloat16, device=device)
            self.conditioning = SelfConditioning(self.slots, self.hidden, torch.add, scale)
            if triton:
                from vllm_dllm.engine.readout_triton import NoiseKernelReadout

                self.readout = NoiseKernelReadout(head, *common)
            else:
                self.readout = NoiseReadout(head, *common)
        self.states = SimpleNamespace(
            all_token_ids=SimpleNamespace(gpu=self._zeros(torch.int32, SEATS, POSITIONS)),
            draft_tokens=self._zeros(torch.int64, SEATS, kind.length),
        )
        policy = CommitPolicy(False, True, True, in_place=kind.mask_token is not None)
        self.sampler = DiffusionSampler(
            self.states, self.slots, policy, self.readout, self.parts, self.conditioning
        )
        self.admission = self._model_state()

    def _zeros(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return linear(hidden, self.weight)

    def _model_state(self) -> DiffusionModelState:
        state = DiffusionModelState.__new__(DiffusionModelState)
        state.slots, state.parts, state.served = self.slots, self.parts, self.served
        state.readout, state.sampler, state.dtype = self.readout, self.sampler, torch.bfloat16
        state.embeddings = self.conditioning  # of which it clears slots only
        state.model_config = SimpleNamespace(
            max_model_len=POSITIONS, get_hidden_size=lambda: self.hidden
        )
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
        """Admit a request to a slot, perhaps with an automaton, options and banned ids.

        `params` are vLLM's; a masked model's are greedy unless they say otherwise.
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

    def batch(self, canvases: int) -> Any:
        """Build what a step over the canvases of the first slots reads of ``InputBatch``."""
        length = self.slots.length
        return SimpleNamespace(
            num_reqs=canvases,
            idx_mapping=torch.arange(canvases, dtype=torch.int32, device=self.device),
            idx_mapping_np=np.arange(canvases),
            num_draft_tokens=canvases * length,
            cu_num_logits_np=np.arange(canvases + 1) * length,
        )


@cache
def automaton(vocabulary: int) -> bytes:
    """The packed automaton of up to 40 lower-case letters; most ids are words of four letters."""
    from canvas_grammar.automaton.compilation import compile_constraint
    from canvas_grammar.automaton.vocabulary import Vocabulary
    from canvas_grammar.constraint import Constraint
    from canvas_grammar.limits import CompileLimits

    words = product(b"abcdefghijklmnopqrstuvwxyz", repeat=4)
    tokens = [b"", *(bytes([byte]) for byte in range(256))]
    tokens += map(bytes, islice(words, vocabulary - len(tokens)))
    known = Vocabulary.from_tokens(tokens, [0])
    letters = Constraint.from_value("regex", "[a-z]{1,40}")
    return compile_constraint(letters, known, CompileLimits()).packed


def bench() -> Iterator[dict[str, Any]]:
    """Time each row at each number of requests; yields records for the report."""
    from vllm.triton_utils import HAS_TRITON

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.inference_mode():
        for name, published in MODELS.items():
            on_gpu = device.type != "cpu" and HAS_TRITON
            model = BareModel(published, device, triton=on_gpu, compile=True)
            model.weight.normal_(std=published.hidden**-0.5)
            compile_sampler(model.admission)
            asked = ASKED if published.kind.mask_token is not None else OF_NOISE
            for row, request in asked.items():
                for count in REQUESTS:
                    which = {"model": name, "step": row, "requests": count}
                    yield which | _timed(model, request, count)


def _timed(model: BareModel, request: dict[str, Any], count: int) -> dict[str, float]:
    """Measure a step.

    Returns:
        `ms`, the median until it is done, and `host_ms`, until the host has launched it. On a GPU
        also `kernels`, `busy_ms` in which one of them runs, and `idle_ms`, the rest of `ms`.
    """
    rows = count * model.slots.length
    hidden = torch.randn((rows, model.hidden), dtype=torch.bfloat16, device=model.device)
    batch, times = model.batch(count), []

    def admit(number: int) -> None:
        """Make the next step the first of each canvas, with all positions free."""
        for slot in range(count):
            model.admit(slot, seed=number, **request)
        model.slots.phase[:count] = Phase.DENOISE
        _wait(model.device)

    for number in range(WARM_STEPS + TIMED_STEPS):
        admit(number)
        begin = time.perf_counter()
        model.sampler(hidden, batch)
        launched = time.perf_counter()
        _wait(model.device)
        times.append((launched - begin, time.perf_counter() - begin))
    host, total = np.median(times[WARM_STEPS:], axis=0) * 1e3
    found = {"ms": round(float(total), 3), "host_ms": round(float(host), 3)}
    admit(0)
    events = device_events(lambda: model.sampler(hidden, batch))
    if events is not None:
        busy = busy_ms(events)
        idle = round(float(total) - busy, 3)
        found |= {"kernels": len(events), "busy_ms": round(busy, 3), "idle_ms": idle}
    return found


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def device_events(call: Callable[[], object], calls: int = 1) -> list[Event] | None:
    """What a GPU runs in calls of a function: kernels, copies, fills; None without CUDA."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    return [
        (event.name, event.time_range.start, event.time_range.end)
        for event in trace.events() or ()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]


def busy_ms(events: Iterable[Event]) -> float:
    """How long at least one of the events lasts.

    The profiler makes launches slower, so idle time is an unprofiled time minus this.
    """
    busy, until = 0.0, -math.inf
    for _, begin, end in sorted(events, key=lambda event: event[1:]):
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    return busy / 1e3
