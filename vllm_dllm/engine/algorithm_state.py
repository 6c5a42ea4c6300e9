"""The tensors that decoding algorithms keep for each slot: parameters, and state between steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from vllm_dllm.decoding import Algorithm, BaseAlgorithm, Canvas, MaskedAlgorithm
from vllm_dllm.engine.to_device import to_device
from vllm_dllm.ranges import AlgorithmConfig

if TYPE_CHECKING:
    from vllm_dllm.engine.slots import Standing

MaybeTensor = TypeVar("MaybeTensor", bound="torch.Tensor | None")


class AlgorithmSlots:
    """One algorithm's tensors for all slots. Rows of slots with other algorithms are never read.

    Attributes:
        algorithm: the decoding rule.
        parameters: the algorithm's settings by name, float32 ``[slots]`` each.
        state: the algorithm's tensors between steps by name, see `StateTensor`.
        adjusts, asks, schedules: whether the algorithm overrides `adjust`, `ask` and `temperature`.
            A step only calls methods that are overridden.
    """

    def __init__(self, algorithm: Algorithm, slots: int, length: int, device: torch.device) -> None:
        """Allocate the tensors for this number of slots, filled with their initial values."""
        self.algorithm = algorithm
        self.parameters = {
            name: torch.zeros(slots, device=device) for name in algorithm.config.ranges()
        }
        self.state = {}
        for name, spec in algorithm.state.items():
            shape = (slots, *([length] if spec.per_position else []), *spec.extra)
            self.state[name] = torch.full(shape, spec.initial, dtype=spec.dtype, device=device)
        rule: Any = type(algorithm)
        self.adjusts = rule.adjust is not BaseAlgorithm.adjust
        self.asks = rule.ask is not BaseAlgorithm.ask
        self.schedules = rule.temperature is not MaskedAlgorithm.temperature

    def enter(self, slot: int, settings: AlgorithmConfig) -> None:
        """Set the parameters and the initial state of the request that enters ``slot``."""
        for name, value in settings.values().items():
            self.parameters[name][slot].fill_(float(value))
        for name, spec in self.algorithm.state.items():
            self.state[name][slot].fill_(spec.initial)

    def keep(
        self, slots: torch.Tensor, new: Mapping[str, torch.Tensor], leaves: torch.Tensor
    ) -> None:
        """Store the state of ``slots`` (int64 ``[n]``) for the next step.

        Args:
            slots: int64 ``[n]``.
            new: the tensors that the step returned, ``[n, ...]`` each.
            leaves: bool ``[n]``, canvases that leave. Their state is reset to its initial values.
        """
        for name, spec in self.algorithm.state.items():
            reset = leaves.view(-1, *[1] * (new[name].ndim - 1))
            self.state[name].index_copy_(0, slots, new[name].masked_fill(reset, spec.initial))


@dataclass(frozen=True)
class AlgorithmBatch:
    """The canvases of a batch that share an algorithm, with their rows of the algorithm's tensors.

    Attributes:
        all_slots: the algorithm, and its tensors for all slots.
        index: int64 ``[m]``, positions of these canvases in the batch; None for the whole batch.
        slots: int64 ``[m]``, the slots of these canvases.
        canvas: the canvases, ``[m, L]``.
        parameters: the algorithm's settings by name, float32 ``[m]`` each.
        state: the algorithm's tensors by name, ``[m, ...]`` each.
    """

    all_slots: AlgorithmSlots
    index: torch.Tensor | None
    slots: torch.Tensor
    canvas: Canvas
    parameters: Mapping[str, torch.Tensor]
    state: Mapping[str, torch.Tensor]

    def rows(self, tensor: MaybeTensor) -> MaybeTensor:
        """The rows ``[m, ...]`` of these canvases in a tensor ``[n, ...]`` of the whole batch."""
        if tensor is None or self.index is None:
            return tensor
        return tensor.index_select(0, self.index)

    def mark(self, flags: torch.Tensor) -> None:
        """Set the flags of these canvases; `flags` (bool ``[n]``) has one for the whole batch."""
        if self.index is None:
            flags.fill_(True)
        else:
            flags.index_fill_(0, self.index, True)


class AlgorithmStates:
    """The tensors of every algorithm that any request has used so far.

    Attributes:
        by_name: the tensors by the algorithm's name, in the order in which they were first used.
    """

    def __init__(self, slots: int, length: int, device: torch.device) -> None:
        self.by_name: dict[str, AlgorithmSlots] = {}
        self._shape = slots, length
        self._device = device
        # For each slot, the position of its algorithm in `by_name`; on the host.
        self._which: np.ndarray = np.zeros(slots, dtype=np.int64)

    def enter(self, slot: int, algorithm: Algorithm, settings: AlgorithmConfig) -> None:
        """Set up ``slot`` for a request; allocates the algorithm's tensors at its first use."""
        name = algorithm.name
        if name not in self.by_name:
            self.by_name[name] = AlgorithmSlots(algorithm, *self._shape, self._device)
        self.by_name[name].enter(slot, settings)
        self._which[slot] = list(self.by_name).index(name)

    def for_slot(self, slot: int) -> AlgorithmSlots:
        """The tensors of the algorithm that decodes the request in ``slot``."""
        return list(self.by_name.values())[self._which[slot]]

    def only(self, name: str, on_host: np.ndarray) -> bool:
        """Whether the requests in these slots (a numpy array) are all decoded by this algorithm."""
        return name in self.by_name and bool(
            (self._which[on_host] == list(self.by_name).index(name)).all()
        )

    def batches(
        self, slots: torch.Tensor, on_host: np.ndarray, canvas: Canvas
    ) -> list[AlgorithmBatch]:
        """Group the canvases of a batch by algorithm.

        Args:
            slots: int64 ``[n]``, the slots of the batch.
            on_host: the same slots as a numpy array.
            canvas: the canvases, ``[n, L]``.

        Returns:
            One entry for each algorithm of the batch.
        """
        which = self._which[on_host]
        algorithms = list(self.by_name.values())
        if (which == which[0]).all():  # most batches have one algorithm
            return [self.batch(algorithms[which[0]], None, slots, canvas)]
        batches = []
        for number in np.unique(which):
            index = to_device(np.flatnonzero(which == number), self._device)
            own_slots = slots.index_select(0, index)
            batches.append(self.batch(algorithms[number], index, own_slots, canvas.take(index)))
        return batches

    @staticmethod
    def batch(
        all_slots: AlgorithmSlots, index: torch.Tensor | None, slots: torch.Tensor, canvas: Canvas
    ) -> AlgorithmBatch:
        """The rows of an algorithm's tensors for some canvases, see `AlgorithmBatch`."""
        parameters = {name: t.index_select(0, slots) for name, t in all_slots.parameters.items()}
        state = {name: t.index_select(0, slots) for name, t in all_slots.state.items()}
        return AlgorithmBatch(all_slots, index, slots, canvas, parameters, state)


def temperatures(batches: Sequence[AlgorithmBatch], now: Standing) -> torch.Tensor:
    """The temperature at which the logits of this step are sampled, float32 ``[n]``."""
    if not any(batch.all_slots.schedules for batch in batches):
        return now.temperature
    parts = []
    for batch in batches:
        own, step, last = map(batch.rows, (now.temperature, now.step, now.schedule_steps))
        parts.append(batch.all_slots.algorithm.temperature(own, (step, last), batch.parameters))
    return parts[0] if len(parts) == 1 else in_batch_order(parts, batches)


def adjustments(batches: Sequence[AlgorithmBatch]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """See `ReadRequest.adjust`."""
    parts = [batch.all_slots.algorithm.adjust(batch.canvas, batch.parameters) for batch in batches]
    ids = in_batch_order([part and part[0] for part in parts], batches)
    amounts = in_batch_order([part and part[1] for part in parts], batches)
    return None if ids is None or amounts is None else (ids, amounts)


def asked(batches: Sequence[AlgorithmBatch]) -> torch.Tensor | None:
    """See `ReadRequest.ask`."""
    return in_batch_order([b.all_slots.algorithm.ask(b.state) for b in batches], batches)


def own_at(batches: Sequence[AlgorithmBatch], temperature: torch.Tensor) -> torch.Tensor | None:
    """See `ReadRequest.own_at`; `temperature` is float32 ``[n]``."""
    owns = [batch.all_slots.algorithm.own_confidence for batch in batches]
    if not any(owns):
        return None
    parts = [
        torch.full_like(batch.slots, own, dtype=torch.bool)
        for batch, own in zip(batches, owns, strict=True)
    ]
    own = in_batch_order(parts, batches)
    return None if own is None else temperature * own


def in_batch_order(
    parts: Sequence[torch.Tensor | None], batches: Sequence[AlgorithmBatch]
) -> torch.Tensor | None:
    """The rows of all algorithms in batch order, 0 where a part is None; None if all parts are."""
    first = next((part for part in parts if part is not None), None)
    if first is None or batches[0].index is None:
        return first
    count = sum(len(batch.slots) for batch in batches)
    whole = first.new_zeros((count, *first.shape[1:]))
    for part, batch in zip(parts, batches, strict=True):
        if part is not None and batch.index is not None:
            whole.index_copy_(0, batch.index, part)
    return whole
