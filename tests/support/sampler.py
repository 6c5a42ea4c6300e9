"""The sampler without an engine: its slots, a readout over given logits, and vLLM's two inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from vllm_dllm.decoding import Algorithm
from vllm_dllm.engine.contracts import CommitPolicy, Readout
from vllm_dllm.engine.optional_parts import OptionalParts
from vllm_dllm.engine.row_options import RowOptions
from vllm_dllm.engine.sampler import DiffusionSampler
from vllm_dllm.engine.slots import CanvasKind, Phase, SlotState
from vllm_dllm.settings.resolution import ResolvedDecoding

FDFO = CommitPolicy(sync=False, early=True, skip_last_commit=True, in_place=True)


def slots_of(
    kind: CanvasKind, algorithms: Sequence[Algorithm], temperature: float = 0.0
) -> SlotState:
    """A denoising canvas for each algorithm, after a prompt of L tokens."""
    slots = SlotState(len(algorithms), kind, torch.device("cpu"))
    for slot, algorithm in enumerate(algorithms):
        choice = ResolvedDecoding(algorithm, algorithm.config(), 9, 4)
        slots.enter(slot, [1] * kind.length, seed=slot)
        slots.configure(slot, choice, temperature, 10 * kind.length)
    slots.phase.fill_(Phase.DENOISE)
    return slots


def sampler_of(
    slots: SlotState,
    readout: Callable[[OptionalParts], Readout],
    asked: Sequence[RowOptions | None],
    mode: str = "raw_logprobs",
    policy: CommitPolicy = FDFO,
) -> DiffusionSampler:
    """A sampler with the readout that the function makes, whose slots have asked for this."""
    parts, device = OptionalParts(slots, mode), slots.device
    for slot, options in enumerate(asked):
        if options is not None:
            parts.rows.enter(slot, options)
            if options.reports:
                parts.logprobs.enter(options)
    history = torch.zeros((len(slots.phase), 64), dtype=torch.int32, device=device)
    states = SimpleNamespace(
        all_token_ids=SimpleNamespace(gpu=history), draft_tokens=slots.tokens.clone()
    )
    return DiffusionSampler(states, slots, policy, readout(parts), parts)


def step(sampler: DiffusionSampler, hidden: torch.Tensor, batch: Sequence[int]) -> Any:
    n, length = len(batch), sampler.slots.length
    given = SimpleNamespace(
        num_reqs=n,
        cu_num_logits_np=np.arange(n + 1) * length,
        idx_mapping=torch.tensor(batch, device=sampler.slots.device),
        idx_mapping_np=np.asarray(batch),
        num_draft_tokens=n * length,
    )
    return sampler(hidden, given)
