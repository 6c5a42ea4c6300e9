"""The rows of a batch in the slots' tensors, and parts of a batch that share an algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch

from vllm_dllm.decoding import Canvas
from vllm_dllm.ops.compiled import compiled
from vllm_dllm.worker.algorithm_state import AlgorithmBatch, AlgorithmSlots, AlgorithmStates
from vllm_dllm.worker.slots import SlotState, Standing

MaybeTensor = TypeVar("MaybeTensor", bound="torch.Tensor | None")
# Standing, canvases, the canvases by algorithm, and the temperatures of this step, float32 [n].
Batch = tuple[Standing, Canvas, list[AlgorithmBatch], torch.Tensor]


def read_batch(state: SlotState, slots: torch.Tensor, on_host: np.ndarray) -> Batch:
    """Read the rows of a batch.

    Args:
        state: the slots.
        slots: int64 ``[n]``, the slots of the batch.
        on_host: the same slots as a numpy array.
    """
    now, before = state.read(slots)
    batches = state.algorithms.batches(slots, on_host, before)
    return now, before, batches, _temperature(batches, now)


def read_batch_compiled(state: SlotState, slots: torch.Tensor, on_host: np.ndarray) -> Batch:
    """`read_batch` in a few kernels, for canvases that share an algorithm."""
    all_slots = state.algorithms.for_slot(int(on_host[0]))
    now, before, parameters, own, temperature = compiled(_read)(state, all_slots, slots)
    batch = AlgorithmBatch(all_slots, None, slots, before, parameters, own)
    return now, before, [batch], temperature


def _read(
    state: SlotState, all_slots: AlgorithmSlots, slots: torch.Tensor
) -> tuple[Standing, Canvas, dict[str, torch.Tensor], dict[str, torch.Tensor], torch.Tensor]:
    now, before = state.read(slots)
    batch = AlgorithmStates.batch(all_slots, None, slots, before)
    return now, before, dict(batch.parameters), dict(batch.state), _temperature([batch], now)


def _temperature(batches: Sequence[AlgorithmBatch], now: Standing) -> torch.Tensor:
    """The temperature at which the logits of this step are sampled, float32 ``[n]``."""
    if not any(batch.all_slots.schedules for batch in batches):
        return now.temperature
    parts = []
    for batch in batches:
        progress = rows_of(now.step, batch), rows_of(now.schedule_steps, batch)
        own = rows_of(now.temperature, batch)
        parts.append(batch.all_slots.algorithm.temperature(own, progress, batch.parameters))
    if len(parts) == 1:
        return parts[0]
    return in_batch_order(parts, batches, len(now.temperature))


def rows_of(tensor: MaybeTensor, batch: AlgorithmBatch) -> MaybeTensor:
    """The rows ``[m, ...]`` of an algorithm's canvases in a tensor ``[n, ...]`` of the batch."""
    if tensor is None or batch.index is None:
        return tensor
    return tensor.index_select(0, batch.index)


def in_batch_order(
    parts: Sequence[torch.Tensor | None], batches: Sequence[AlgorithmBatch], count: int
) -> torch.Tensor | None:
    """The rows of all algorithms in batch order, 0 where a part is None; None if all parts are."""
    first = next((part for part in parts if part is not None), None)
    if first is None or batches[0].index is None:
        return first
    whole = first.new_zeros((count, *first.shape[1:]))
    for part, batch in zip(parts, batches, strict=True):
        if part is not None and batch.index is not None:
            whole.index_copy_(0, batch.index, part)
    return whole
