"""The contract of a decoding algorithm, and the registry that names them.

An algorithm is a pure function of tensors. It knows one canvas per row and nothing
of requests, batches, caches or phases; all state that it needs comes in and goes out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
        statistics: row statistics ``[slots, L]`` of a forward pass over the canvas.
        last: bool ``[slots]``, true where the step cap is reached: decide everything now.
        parameters: per-slot float32 ``[slots]`` tensors, by the names in `Algorithm.parameters`.
    """

    statistics: RowStatistics
    last: torch.Tensor
    parameters: Mapping[str, torch.Tensor]


class Algorithm(Protocol):
    """A decoding algorithm: a name, its per-slot parameters, and one pure step."""

    name: str
    parameters: tuple[str, ...]

    def step(self, canvas: Canvas, context: StepContext) -> Canvas:
        """One update of every canvas. No host sync, no Python loop over slots."""
        ...


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
