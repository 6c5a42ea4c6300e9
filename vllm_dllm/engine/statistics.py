"""From the hidden states of canvases to what a decoding algorithm reads.

Two ways, one interface: greedy rows of a masked model (argmax and probability) and sampled
rows of a uniform-noise model (with samples, entropies and, for self-conditioning, the soft
embedding). Neither ever holds the logits of a whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from vllm_dllm.decoding import Algorithm
from vllm_dllm.engine.requests import SlotState
from vllm_dllm.engine.whole_rows import WholeRows
from vllm_dllm.ops.noise import Stream, row_keys, uniform_tokens
from vllm_dllm.ops.row_stats import RowStatistics, row_statistics
from vllm_dllm.ops.tiled_stats import tiled_statistics

# Bytes of float32 temporaries that a step may hold between hidden states and statistics.
HEAD_BYTES = 256 << 20
TILE_BYTES = 32 << 20


@dataclass(frozen=True)
class Rows:
    """What one forward pass says about the canvases of some slots.

    Attributes:
        statistics: row statistics ``[n, L]``.
        noise: int64 ``[n, L]``, uniform random tokens, or None where none are needed.
        soft: float32 ``[n, L, hidden]``, the soft embedding before the embedding's scale, or None.
    """

    statistics: RowStatistics
    noise: torch.Tensor | None = None
    soft: torch.Tensor | None = None


class Statistics(Protocol):
    """Row statistics for the canvases of some slots."""

    def __call__(self, hidden: torch.Tensor, slots: torch.Tensor, on_host: np.ndarray) -> Rows:
        """`Rows` of hidden states ``[n * L, hidden]`` over the canvases of some slots.

        The slots are given on the device, int64 ``[n]``, and on the host.
        """
        ...


class GreedyStatistics:
    """Argmax and probability of a masked model; the mask token is never chosen."""

    def __init__(
        self, head: Callable[[torch.Tensor], torch.Tensor], vocabulary: int, slots: SlotState
    ) -> None:
        mask = slots.kind.mask_token
        if mask is None:
            raise ValueError("greedy statistics are for models with a mask token")
        self.head = head
        self.mask_token = mask
        self.length = slots.length
        self.rows = max(1, HEAD_BYTES // (4 * vocabulary))

    def __call__(self, hidden: torch.Tensor, slots: torch.Tensor, on_host: np.ndarray) -> Rows:
        """See `Statistics`."""
        parts = [
            row_statistics(self.head(chunk), self.mask_token) for chunk in hidden.split(self.rows)
        ]
        if len(parts) == 1:
            return Rows(parts[0].view(-1, self.length))
        token = torch.cat([part.token for part in parts])
        probability = torch.cat([part.probability for part in parts])
        return Rows(RowStatistics(token, probability).view(-1, self.length))


class TemperedStatistics:
    """Everything about a tempered row, and the soft embedding for the next forward pass."""

    def __init__(self, whole: WholeRows, algorithm: Algorithm) -> None:
        self.whole = whole
        self.head = whole.head
        self.state = whole.slots
        self.algorithm = algorithm
        self.position = torch.arange(self.state.length, device=self.state.device)

    def __call__(self, hidden: torch.Tensor, slots: torch.Tensor, on_host: np.ndarray) -> Rows:
        """See `Statistics`."""
        state = self.state
        step = state.step[slots]
        parameters = {name: tensor[slots] for name, tensor in state.parameters.items()}
        temperature = self.algorithm.temperature(step, parameters)
        keys = row_keys(state.seed[slots], state.start[slots], step.long())  # [n]
        candidates = row_keys(keys[:, None], self.position, Stream.CANDIDATE)  # [n, L]
        flat, soft = tiled_statistics(
            hidden,
            self.head,
            temperature.repeat_interleave(state.length),
            candidates.flatten(),
            TILE_BYTES,
        )
        statistics = flat.view(-1, state.length)
        if soft is not None:
            soft = soft.view(len(slots), state.length, -1)
            self.whole.refine(statistics, soft, hidden, (temperature, candidates), on_host)
        noise = uniform_tokens(row_keys(keys, Stream.RENOISE), state.length, self.head.vocabulary)
        return Rows(statistics, noise, soft)
