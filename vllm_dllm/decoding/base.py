"""The contract of a decoding algorithm, and the registry that names them.

An algorithm is a pure function of tensors. It knows one canvas per row and nothing
of requests, batches, caches or phases; all state that it needs comes in and goes out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol, TypeVar

import torch

from vllm_dllm.ops.row_stats import RowStatistics


@dataclass(frozen=True)
class Canvas:
    """One canvas per row. Masks are explicit: a token id never says what a position is.

    Attributes:
        tokens: int64 ``[slots, L]``, the ids that the model reads.
        masked: bool ``[slots, L]``, positions that are still to be decided.
        fixed: bool ``[slots, L]``, positions that never change (the prompt's tail).
    """

    tokens: torch.Tensor
    masked: torch.Tensor
    fixed: torch.Tensor


@dataclass(frozen=True)
class StepContext:
    """What a step knows beside the canvas.

    Attributes:
        statistics: row statistics ``[slots, L]`` of a forward pass over the canvas; with samples
            (`SampledStatistics`) for an algorithm that `samples`.
        last: bool ``[slots]``, true where the step cap is reached: decide everything now.
        parameters: per-slot float32 ``[slots]`` tensors, by the names in `Algorithm.parameters`.
        state: what the algorithm's last step returned for these slots, or the initial values.
        noise: int64 ``[slots, L]``, uniform random tokens, for an algorithm that `samples`.
        present: bool ``[slots, L]``, positions that exist; None when all do. Only narrow
            canvases have others, and their statistics mean nothing.
    """

    statistics: RowStatistics
    last: torch.Tensor
    parameters: Mapping[str, torch.Tensor]
    state: Mapping[str, torch.Tensor] = field(default_factory=dict)
    noise: torch.Tensor | None = None
    present: torch.Tensor | None = None


@dataclass(frozen=True)
class Update:
    """What a step returns.

    Attributes:
        canvas: what the model reads next; where `done`, what is committed.
        done: bool ``[slots]``, the rule has finished with the canvas.
        state: the tensors named in `Algorithm.state`, for the next step.
    """

    canvas: Canvas
    done: torch.Tensor
    state: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class StateTensor:
    """A tensor that an algorithm keeps for each slot while a canvas is denoised.

    Attributes:
        dtype: its dtype.
        per_position: shape ``[slots, L]`` rather than ``[slots]``.
        initial: the value before the first step of a canvas.
    """

    dtype: torch.dtype
    per_position: bool
    initial: float


class Algorithm(Protocol):
    """A decoding algorithm: a name, its per-slot tensors, and one pure step.

    Attributes:
        name: what users write.
        parameters: names of per-slot parameters.
        state: per-slot tensors between the steps of a canvas; the engine stores them.
        samples: it draws tokens, so it needs samples, entropies and random tokens.
        edits: it may change decided positions, so no part of a canvas is final before `done`.
    """

    name: str
    parameters: tuple[str, ...]
    state: Mapping[str, StateTensor]
    samples: bool
    edits: bool

    def temperature(
        self, step: torch.Tensor, parameters: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Float32 ``[slots]``, at which the logits of a step are sampled; 0 is greedy.

        `step` is int32 ``[slots]``, the steps taken before this one.
        """
        ...

    def step(self, canvas: Canvas, context: StepContext) -> Update:
        """One update of every canvas. No host sync, no Python loop over slots."""
        ...


class Greedy:
    """What algorithms that only ever take the most likely token have in common."""

    state: Mapping[str, StateTensor] = MappingProxyType({})
    samples: bool = False
    edits: bool = False

    def temperature(
        self, step: torch.Tensor, parameters: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Zero."""
        return torch.zeros_like(step, dtype=torch.float32)


_REGISTRY: dict[str, Algorithm] = {}


AlgorithmType = TypeVar("AlgorithmType", bound=Callable[[], Algorithm])


def register_algorithm(cls: AlgorithmType) -> AlgorithmType:
    """Class decorator: make an algorithm available under its ``name``."""
    algorithm = cls()
    if algorithm.name in _REGISTRY:
        raise ValueError(f"decoding algorithm {algorithm.name!r} is registered twice")
    _REGISTRY[algorithm.name] = algorithm
    return cls


def algorithm_names() -> tuple[str, ...]:
    """The registered names, sorted."""
    return tuple(sorted(_REGISTRY))


def get_algorithm(name: str) -> Algorithm:
    """The algorithm called ``name``.

    Raises:
        ValueError: no such algorithm; the message lists those there are.
    """
    if name not in _REGISTRY:
        raise ValueError(
            f"unknown decoding algorithm {name!r}; available: {', '.join(algorithm_names())}"
        )
    return _REGISTRY[name]
