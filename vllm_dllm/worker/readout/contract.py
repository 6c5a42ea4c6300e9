"""What is asked of a readout, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from vllm_dllm.constraints.decoding.best_path import CanvasWindow
from vllm_dllm.constraints.decoding.constrained_step import ConstrainedPath
from vllm_dllm.ops.statistics.rows import RowStatistics
from vllm_dllm.worker.slots import SlotState

# Bytes of float32 temporaries that a step may hold between hidden states and statistics: for whole
# rows of logits, and for tiles of them.
HEAD_BYTES = 256 << 20
TILE_BYTES = 32 << 20
# Rows of the examples that functions are compiled with ahead of time. The compiled functions take
# any other number, too; the compiler lays out its loops for a few canvases.
EXAMPLE_ROWS = 128


@dataclass(frozen=True)
class ReadRequest:
    """The canvases of a batch, and what their algorithms and requests need of the model's output.

    Attributes:
        slots: int64 ``[n]``, on the device.
        on_host: the same for numpy.
        width: positions of the canvases that exist, int64 ``[n]``, or L for all.
        temperature: float32 ``[n]``, of this step; 0 is greedy.
        draws: whether a request of the batch draws, on the host.
        needs_rows: whether a request of the batch has biases, filters or logprobs, on the host.
        adjust: ids int64 ``[n, L]`` and what to add to their logits, or None.
        ask: ids int64 ``[n, L, K]`` whose log-probabilities are needed, or None.
        entropy: whether entropies are needed.
        window: what constraints see of the ``n`` canvases; None where no request has a constraint.
    """

    slots: torch.Tensor
    on_host: np.ndarray
    width: torch.Tensor | int
    temperature: torch.Tensor
    draws: bool = False
    needs_rows: bool = False
    adjust: tuple[torch.Tensor, torch.Tensor] | None = None
    ask: torch.Tensor | None = None
    entropy: bool = False
    window: CanvasWindow | None = None

    def part(self, first: int, end: int) -> ReadRequest:
        """The request for the canvases ``first..end`` of the batch."""
        some = slice(first, end)
        return ReadRequest(
            self.slots[some],
            self.on_host[some],
            self.width if isinstance(self.width, int) else self.width[some],
            self.temperature[some],
            self.draws,
            self.needs_rows,
            None if self.adjust is None else (self.adjust[0][some], self.adjust[1][some]),
            None if self.ask is None else self.ask[some],
            self.entropy,
            None if self.window is None else self.window.part(some),
        )


@dataclass
class Readings:
    """What one forward pass says about the canvases of some slots.

    Attributes:
        statistics: row statistics ``[n, L]``.
        noise: int64 ``[n, L]``, uniform random tokens, or None where none are needed.
        next_canvas: int64 ``[n, L]``, uniform random tokens that the canvases behind these begin
            with, where these are L wide; else None.
        soft_embedding: float32 ``[n, L, hidden]``, before the embedding's scale, or None.
        log_probabilities: float32 ``[n, L, K]``, of the ids that were asked for, or None.
        path: the paths of constrained canvases, or None where no request has a constraint.
    """

    statistics: RowStatistics
    noise: torch.Tensor | None = None
    next_canvas: torch.Tensor | None = None
    soft_embedding: torch.Tensor | None = None
    log_probabilities: torch.Tensor | None = None
    path: ConstrainedPath | None = None


class Readout(Protocol):
    """A way from hidden states to `Readings`, chosen once when the engine starts."""

    def read(self, hidden: torch.Tensor, request: ReadRequest) -> Readings:
        """`Readings` of hidden states ``[n * L, hidden]``."""
        ...

    def warm_up(self, hidden: torch.Tensor) -> None:
        """Call what a step calls, on `EXAMPLE_ROWS` hidden states; all ranks do so together."""
        ...


def batch_extremes(state: SlotState) -> tuple[int, int]:
    """Rows of the smallest and of the largest batch of canvases."""
    slots, length = state.tokens.shape
    return length, slots * length
