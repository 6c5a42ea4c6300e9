"""The interface of readouts: what a step asks for, and what a readout returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from vllm_dllm.engine.slots import SlotState
from vllm_dllm.ops.statistics.rows import RowStatistics

if TYPE_CHECKING:
    from vllm_dllm.constraints.grammar import CanvasWindow, ConstrainedPath

# How many bytes the temporaries between hidden states and statistics may take: for whole rows of
# logits, and for tiles of them. A small tile stays in a CPU's caches. On a GPU each operator on a
# tile is a kernel to launch, so tiles are large and few.
HEAD_BYTES = 256 << 20
TILE_BYTES_CPU = 32 << 20
TILE_BYTES_GPU = 1 << 30
# Number of rows of the examples with which functions are compiled ahead of time: those of a few
# canvases, for which the compiler lays out its loops. Compiled functions take any number of rows.
EXAMPLE_ROWS = 128


def empty_path(window: CanvasWindow) -> ConstrainedPath:
    """Room for the paths of a batch with constraints, of which none is known yet."""
    from vllm_dllm.constraints.grammar import ConstrainedPath

    return ConstrainedPath.empty(window)


@dataclass(frozen=True)
class ReadRequest:
    """The canvases of a batch, and what must be read for them from the model's output.

    Attributes:
        slots: int64 ``[n]``, the slots of the batch, on the device.
        on_host: the same slots as a numpy array.
        width: number of positions of each canvas, int64 ``[n]``, or L for all of them.
        temperature: float32 ``[n]``, the temperatures of this step; 0 is greedy.
        draws: whether any request of the batch draws.
        needs_rows: whether any request of the batch has biases, filters or logprobs.
        adjust: ids int64 ``[n, L]`` and what to add to their logits (float32 ``[n, L]``), or None.
        ask: ids int64 ``[n, L, K]`` whose log-probabilities are needed, or None.
        entropy: whether entropies are needed.
        window: the canvases as constraints see them; None where no request has a constraint.
        may_go_on: whether any canvas may be denoised again after this step, as far as the host
            knows; if not, no soft embedding is needed.
        own_at: float32 ``[n]``, see `with_drawn`; None where no algorithm of the batch asks for it.
        logprob: whether `Readings.logprob` is needed.
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
    may_go_on: bool = True
    own_at: torch.Tensor | None = None
    logprob: bool = False

    def part(self, first: int, end: int) -> ReadRequest:
        """The request for the canvases ``first..end`` of the batch."""
        rows = slice(first, end)
        return ReadRequest(
            self.slots[rows],
            self.on_host[rows],
            self.width if isinstance(self.width, int) else self.width[rows],
            self.temperature[rows],
            self.draws,
            self.needs_rows,
            None if self.adjust is None else (self.adjust[0][rows], self.adjust[1][rows]),
            None if self.ask is None else self.ask[rows],
            self.entropy,
            None if self.window is None else self.window.part(rows),
            self.may_go_on,
            None if self.own_at is None else self.own_at[rows],
            self.logprob,
        )

    def own_at_rows(self, length: int) -> torch.Tensor | None:
        """`own_at` of the ``n * length`` positions."""
        return None if self.own_at is None else self.own_at.repeat_interleave(length)


@dataclass
class Readings:
    """What a readout has computed from the hidden states of a batch of canvases.

    Attributes:
        statistics: row statistics ``[n, L]``.
        noise: int64 ``[n, L]``, uniform random tokens; None for a masked model.
        next_canvas: int64 ``[n, L]``, uniform random tokens with which the canvases behind these
            begin; None for a masked model, or where not all canvases are L wide.
        soft_embedding: float32 ``[n, L, hidden]``, before the embedding's scale; None for a masked
            model, or where no canvas may go on.
        log_probabilities: float32 ``[n, L, K]``, those of the ids in `ReadRequest.ask`, or None.
        path: the paths of constrained canvases; None where no request has a constraint.
        logprob: float32 ``[n, L]``, the log-probabilities at temperature 1 of the tokens in
            `statistics`, filters aside. Those of requests with biases or constraints are
            meaningless. None where it is not needed, and for a model of uniform noise.
    """

    statistics: RowStatistics
    noise: torch.Tensor | None = None
    next_canvas: torch.Tensor | None = None
    soft_embedding: torch.Tensor | None = None
    log_probabilities: torch.Tensor | None = None
    path: ConstrainedPath | None = None
    logprob: torch.Tensor | None = None


class Readout(Protocol):
    """Computes `Readings` from hidden states; an engine has one, chosen when it starts.

    Attributes:
        canvases: of how many canvases there are whole rows of logits at a time.
    """

    canvases: int

    def read(self, hidden: torch.Tensor, request: ReadRequest) -> Readings:
        """The readings of a batch, from its hidden states ``[n * L, hidden]``."""
        ...

    def warm_up(self, hidden: torch.Tensor) -> None:
        """Call every compiled function of a step once, to compile it before the first request.

        All ranks call this together.

        Args:
            hidden: example hidden states, ``[EXAMPLE_ROWS, hidden]``.
        """
        ...


def tile_budget(device: torch.device) -> int:
    """How many bytes the temporaries of a tile may take on a device."""
    return TILE_BYTES_CPU if device.type == "cpu" else TILE_BYTES_GPU


def batch_extremes(state: SlotState) -> tuple[int, int]:
    """Number of rows of the smallest and of the largest possible batch of canvases."""
    slots, length = state.tokens.shape
    return length, slots * length


class PredictionStore(Protocol):
    """Keeps a self-conditioned model's last prediction of each canvas."""

    def store(self, slot: torch.Tensor, soft: torch.Tensor, keep: torch.Tensor) -> None:
        """Store soft embeddings.

        Args:
            slot: int64 ``[n]``.
            soft: float32 ``[n, L, hidden]``, soft embeddings of their canvases.
            keep: bool ``[n]``; where it is false the slot's prediction is reset to zeros.
        """
        ...

    def drop(self, slot: torch.Tensor) -> None:
        """Reset the predictions of ``slot`` (int64 ``[n]``) to zeros."""
        ...
