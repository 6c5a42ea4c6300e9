"""The sampler without an engine: its slots, a readout over given logits, and vLLM's two inputs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_dllm.decoding import Algorithm
from vllm_dllm.engine.contracts import CommitPolicy, Readout
from vllm_dllm.engine.logprobs import LogprobReports
from vllm_dllm.engine.optional_parts import OptionalParts
from vllm_dllm.engine.row_options import RowOptions
from vllm_dllm.engine.sampler import DiffusionSampler
from vllm_dllm.engine.slots import CanvasKind, Phase, SlotState
from vllm_dllm.settings.resolution import ResolvedDecoding

FDFO = CommitPolicy(sync=False, early=True, skip_last_commit=True, in_place=True)


def slots_of(
    kind: CanvasKind,
    algorithms: Sequence[Algorithm],
    temperature: float = 0.0,
    device: str = "cpu",
) -> SlotState:
    """A denoising canvas for each algorithm, after a prompt of L tokens."""
    slots = SlotState(len(algorithms), kind, torch.device(device))
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
    history = torch.zeros((len(slots.phase), 64), dtype=torch.int32, device=device)
    states = SimpleNamespace(
        all_token_ids=SimpleNamespace(gpu=history), draft_tokens=slots.tokens.clone()
    )
    return DiffusionSampler(states, slots, policy, readout(parts), parts)


def step(sampler: DiffusionSampler, hidden: torch.Tensor, batch: Sequence[int]) -> Any:
    """One step of the canvases in the slots of `batch`, from their hidden states."""
    n, length = len(batch), sampler.slots.length
    given = SimpleNamespace(
        num_reqs=n,
        cu_num_logits_np=np.arange(n + 1) * length,
        idx_mapping=torch.tensor(batch, device=sampler.slots.device),
        idx_mapping_np=np.asarray(batch),
        num_draft_tokens=n * length,
    )
    return sampler(hidden, given)


def tensors_in(held: Any) -> Iterator[torch.Tensor]:
    """The tensors that an object holds: in its attributes, containers and dataclasses."""
    if isinstance(held, torch.Tensor):
        yield held
    elif isinstance(held, dict):
        for value in held.values():
            yield from tensors_in(value)
    elif isinstance(held, list | tuple):
        for value in held:
            yield from tensors_in(value)
    elif is_dataclass(held):
        yield from tensors_in([getattr(held, f.name) for f in fields(held)])
    elif isinstance(held, LogprobReports):
        yield from tensors_in(
            [value for name, value in vars(held).items() if name not in ("slots", "rows")]
        )


def size(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages of these tensors; a view counts as the whole that it keeps alive."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


class Alive(TorchDispatchMode):
    """Knows which tensors that operators have made inside this context are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.made += [weakref.ref(tensor) for tensor in tensors_in(result)]
        return result

    def now(self) -> list[torch.Tensor]:
        self.made = [made for made in self.made if made() is not None]
        found = (made() for made in self.made)
        return [tensor for tensor in found if tensor is not None]
