"""What decoding algorithms keep for their requests: parameters, and tensors between steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_dllm.decoding import Algorithm, BaseAlgorithm, Canvas, MaskedAlgorithm
from vllm_dllm.settings.ranges import AlgorithmConfig


class AlgorithmSlots:
    """One algorithm's tensors for all slots; those of slots with another algorithm are not read.

    Attributes:
        algorithm: the decoding rule.
        parameters: float32 ``[slots]`` each, its settings.
        state: its tensors between steps, see `StateTensor`.
        adjusts, asks, schedules: whether it overrides `adjust`, `ask` and `temperature`. A step
            does not call what would do nothing.
    """

    def __init__(self, algorithm: Algorithm, slots: int, length: int, device: torch.device) -> None:
        """Allocate the tensors at their initial values."""
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
        """A request enters ``slot``: its parameters, and the initial state."""
        for name, value in settings.values().items():
            self.parameters[name][slot].fill_(float(value))
        for name, spec in self.algorithm.state.items():
            self.state[name][slot].fill_(spec.initial)

    def keep(
        self, slots: torch.Tensor, new: Mapping[str, torch.Tensor], leaves: torch.Tensor
    ) -> None:
        """Store the state of ``slots`` (int64 ``[n]``) for the next step.

        It is what the step returned, and the initial state where the canvas ``leaves`` (bool
        ``[n]``).
        """
        for name, spec in self.algorithm.state.items():
            at = leaves.view(-1, *[1] * (new[name].ndim - 1))
            self.state[name].index_copy_(0, slots, new[name].masked_fill(at, spec.initial))


@dataclass(frozen=True)
class AlgorithmBatch:
    """The canvases of a batch that share an algorithm, and what a step reads of its tensors.

    Attributes:
        of: the algorithm's tensors for all slots.
        index: int64 ``[m]``, which canvases of the batch; None for all of them.
        slots: int64 ``[m]``, their slots.
        canvas: ``[m, L]``.
        parameters: float32 ``[m]`` each.
        state: ``[m, ...]`` each.
    """

    of: AlgorithmSlots
    index: torch.Tensor | None
    slots: torch.Tensor
    canvas: Canvas
    parameters: Mapping[str, torch.Tensor]
    state: Mapping[str, torch.Tensor]


class AlgorithmStates:
    """The tensors of each algorithm that a request has asked for.

    Attributes:
        by_name: the tensors, by the algorithm's name, in the order of their first use.
    """

    def __init__(self, slots: int, length: int, device: torch.device) -> None:
        self.by_name: dict[str, AlgorithmSlots] = {}
        self._shape = slots, length
        self._device = device
        # On the host: the position of each slot's algorithm in `by_name`.
        self._which: np.ndarray = np.zeros(slots, dtype=np.int64)

    def enter(self, slot: int, algorithm: Algorithm, settings: AlgorithmConfig) -> None:
        """A request enters ``slot`` with its algorithm, whose tensors exist from now on."""
        name = algorithm.name
        if name not in self.by_name:
            self.by_name[name] = AlgorithmSlots(algorithm, *self._shape, self._device)
        self.by_name[name].enter(slot, settings)
        self._which[slot] = list(self.by_name).index(name)

    def of(self, slot: int) -> AlgorithmSlots:
        """The tensors of the algorithm that decodes the request in ``slot``."""
        return list(self.by_name.values())[self._which[slot]]

    def batches(
        self, slots: torch.Tensor, on_host: np.ndarray, canvas: Canvas
    ) -> list[AlgorithmBatch]:
        """A batch's canvases by algorithm.

        Args:
            slots: int64 ``[n]``.
            on_host: the same for numpy.
            canvas: ``[n, L]``.
        """
        which = self._which[on_host]
        known = list(self.by_name.values())
        if (which == which[0]).all():  # most batches have one algorithm
            return [self._batch(known[which[0]], None, slots, canvas)]
        found = []
        for number in np.unique(which):
            at = torch.from_numpy(np.flatnonzero(which == number))
            index = at.to(self._device, non_blocking=True)
            some = slots.index_select(0, index)
            found.append(self._batch(known[number], index, some, canvas.take(index)))
        return found

    @staticmethod
    def _batch(
        of: AlgorithmSlots, index: torch.Tensor | None, slots: torch.Tensor, canvas: Canvas
    ) -> AlgorithmBatch:
        parameters = {name: t.index_select(0, slots) for name, t in of.parameters.items()}
        state = {name: t.index_select(0, slots) for name, t in of.state.items()}
        return AlgorithmBatch(of, index, slots, canvas, parameters, state)
