"""The decoding algorithms of a batch: their tensors in all slots, and a call of each for a step.

Requests of one batch may use different algorithms. The only loops of a step are the loops over
algorithms in this file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from vllm_dllm.decoding import Algorithm, Canvas
from vllm_dllm.engine.to_device import to_device
from vllm_dllm.ranges import AlgorithmConfig

MaybeTensor = TypeVar("MaybeTensor", bound="torch.Tensor | None")


class AlgorithmSlots:
    """One algorithm's tensors for all slots. The rows of slots with other algorithms are ignored.

    Attributes:
        algorithm: the decoding rule.
        parameters: the algorithm's settings by name, float32 ``[slots]`` each.
        state: the algorithm's tensors between steps by name, see `StateTensor`.
        schedules: whether the algorithm overrides `temperature`.
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
        self.schedules = rule.temperature is not Algorithm.temperature

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

    def batch(
        self, index: torch.Tensor | None, slots: torch.Tensor, canvas: Canvas
    ) -> AlgorithmBatch:
        """Read the rows of some canvases; arguments as the attributes of `AlgorithmBatch`."""
        parameters = {name: t.index_select(0, slots) for name, t in self.parameters.items()}
        state = {name: t.index_select(0, slots) for name, t in self.state.items()}
        return AlgorithmBatch(self, index, slots, canvas, parameters, state)


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

    @property
    def algorithm(self) -> Algorithm:
        """The decoding rule."""
        return self.all_slots.algorithm

    def rows(self, tensor: MaybeTensor) -> MaybeTensor:
        """The rows ``[m, ...]`` of these canvases in a tensor ``[n, ...]`` of the whole batch."""
        if tensor is None or self.index is None:
            return tensor
        return tensor.index_select(0, self.index)


class AlgorithmStates:
    """The tensors of every algorithm that any request has used so far.

    Attributes:
        by_name: the tensors by the algorithm's name, in the order in which they were first used.
    """

    def __init__(self, slots: int, length: int, device: torch.device) -> None:
        self.by_name: dict[str, AlgorithmSlots] = {}
        self._shape = slots, length
        self._device = device
        # The position of each slot's algorithm in `by_name`; on the host.
        self._which: np.ndarray = np.zeros(slots, dtype=np.int64)

    def enter(self, slot: int, algorithm: Algorithm, settings: AlgorithmConfig) -> None:
        """Set up ``slot`` for a request; allocates the algorithm's tensors at its first use."""
        name = algorithm.name
        if name not in self.by_name:
            self.by_name[name] = AlgorithmSlots(algorithm, *self._shape, self._device)
        self.by_name[name].enter(slot, settings)
        self._which[slot] = list(self.by_name).index(name)

    def for_slot(self, slot: int) -> AlgorithmSlots:
        """Return the tensors of the algorithm that decodes the request in ``slot``."""
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
            return [algorithms[which[0]].batch(None, slots, canvas)]
        batches = []
        for number in np.unique(which):
            index = to_device(np.flatnonzero(which == number), self._device)
            own_slots = slots.index_select(0, index)
            batches.append(algorithms[number].batch(index, own_slots, canvas.take(index)))
        return batches


def in_batch_order(
    parts: Sequence[torch.Tensor | None], batches: Sequence[AlgorithmBatch]
) -> torch.Tensor | None:
    """Put all algorithms' rows in batch order, 0 where a part is None; None if all parts are."""
    first = next((part for part in parts if part is not None), None)
    if first is None or batches[0].index is None:
        return first
    count = sum(len(batch.slots) for batch in batches)
    whole = first.new_zeros((count, *first.shape[1:]))
    for part, batch in zip(parts, batches, strict=True):
        if part is not None and batch.index is not None:
            whole.index_copy_(0, batch.index, part)
    return whole


def edited(batches: Sequence[AlgorithmBatch]) -> torch.Tensor:
    """Canvases whose visible tokens may change until they are done, bool ``[n]``."""
    count = sum(len(batch.slots) for batch in batches)
    flags = batches[0].slots.new_zeros(count, dtype=torch.bool)
    for batch in batches:
        if not batch.algorithm.edits:
            continue
        if batch.index is None:
            flags.fill_(True)
        else:
            flags.index_fill_(0, batch.index, True)
    return flags


def temperatures(
    batches: Sequence[AlgorithmBatch],
    temperature: torch.Tensor,
    progress: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """The temperatures at which a step's logits are sampled, float32 ``[n]``.

    The arguments are those of `Algorithm.temperature` for the whole batch.
    """
    if not any(batch.all_slots.schedules for batch in batches):
        return temperature
    parts = []
    for batch in batches:
        own, step, last = (batch.rows(tensor) for tensor in (temperature, *progress))
        parts.append(batch.algorithm.temperature(own, (step, last), batch.parameters))
    found = in_batch_order(parts, batches)
    assert found is not None
    return found


def adjustments(batches: Sequence[AlgorithmBatch]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """See `ReadRequest.adjust`."""
    parts = [batch.algorithm.adjust(batch.canvas, batch.parameters) for batch in batches]
    ids = in_batch_order([part and part[0] for part in parts], batches)
    amounts = in_batch_order([part and part[1] for part in parts], batches)
    return None if ids is None or amounts is None else (ids, amounts)


def asked_ids(batches: Sequence[AlgorithmBatch]) -> torch.Tensor | None:
    """See `ReadRequest.ask`."""
    return in_batch_order([batch.algorithm.ask(batch.state) for batch in batches], batches)


def own_confidence(
    batches: Sequence[AlgorithmBatch], temperature: torch.Tensor
) -> torch.Tensor | None:
    """See `ReadRequest.own_confidence_temperature`; `temperature` is float32 ``[n]``."""
    owns = [batch.algorithm.own_confidence for batch in batches]
    if not any(owns):
        return None
    parts = [
        torch.full_like(batch.slots, own, dtype=torch.bool)
        for batch, own in zip(batches, owns, strict=True)
    ]
    own = in_batch_order(parts, batches)
    return None if own is None else temperature * own
