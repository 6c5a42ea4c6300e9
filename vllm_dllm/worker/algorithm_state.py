"""What algorithms keep for their requests: settings, and tensors between the steps of a canvas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from vllm_dllm.decoding import Algorithm, Canvas

Given = TypeVar("Given", bound="torch.Tensor | None")


@dataclass(frozen=True)
class Bank:
    """One algorithm's tensors for all slots; those of slots with another one are not read.

    Attributes:
        algorithm: the rule.
        parameters: float32 ``[slots]`` each, its settings.
        state: its tensors between steps, see `StateTensor`.
    """

    algorithm: Algorithm
    parameters: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]

    @classmethod
    def make(cls, algorithm: Algorithm, slots: int, length: int, device: torch.device) -> Bank:
        """Tensors at their initial values."""
        state = {}
        for name, spec in algorithm.state.items():
            shape = (slots, *([length] if spec.per_position else []), *spec.extra)
            state[name] = torch.full(shape, spec.initial, dtype=spec.dtype, device=device)
        names = algorithm.config.ranges()
        return cls(algorithm, {name: torch.zeros(slots, device=device) for name in names}, state)

    def reset(self, slot: int) -> None:
        """A request enters ``slot``: initial state."""
        for name, spec in self.algorithm.state.items():
            self.state[name][slot].fill_(spec.initial)

    def keep(
        self, slots: torch.Tensor, new: Mapping[str, torch.Tensor], leaves: torch.Tensor
    ) -> None:
        """State of ``slots`` (int64 ``[n]``) for the next step.

        It is what the step returned, and the initial one for those whose canvas ``leaves`` (bool
        ``[n]``).
        """
        for name, spec in self.algorithm.state.items():
            at = leaves.view(-1, *[1] * (new[name].ndim - 1))
            self.state[name].index_copy_(0, slots, new[name].masked_fill(at, spec.initial))


@dataclass(frozen=True)
class Group:
    """The canvases of a batch that share an algorithm, and what a step reads of its tensors.

    Attributes:
        bank: the algorithm's.
        index: int64 ``[m]``, which canvases of the batch; None for all of them.
        slots: int64 ``[m]``, their slots.
        canvas: ``[m, L]``.
        parameters: float32 ``[m]`` each.
        state: ``[m, ...]`` each.
    """

    bank: Bank
    index: torch.Tensor | None
    slots: torch.Tensor
    canvas: Canvas
    parameters: Mapping[str, torch.Tensor]
    state: Mapping[str, torch.Tensor]

    @classmethod
    def of(
        cls, bank: Bank, index: torch.Tensor | None, slots: torch.Tensor, canvas: Canvas
    ) -> Group:
        """Those at ``index`` of a batch with ``slots`` (int64 ``[n]``) and their canvases."""
        if index is not None:
            slots, canvas = slots.index_select(0, index), canvas.take(index)
        parameters, state = (
            {name: tensor.index_select(0, slots) for name, tensor in tensors.items()}
            for tensors in (bank.parameters, bank.state)
        )
        return cls(bank, index, slots, canvas, parameters, state)

    def take(self, tensor: Given) -> Given:
        """The group's rows of a tensor ``[n, ...]`` of the batch."""
        if tensor is None or self.index is None:
            return tensor
        return tensor.index_select(0, self.index)
