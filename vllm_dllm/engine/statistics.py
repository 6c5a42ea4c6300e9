"""From the hidden states of canvases to what a decoding algorithm reads.

Two ways, one interface: rows of a masked model (a token and its confidence) and rows of a
model of uniform noise (with samples, entropies and, for self-conditioning, the soft
embedding). Neither ever holds the logits of a whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from vllm_dllm.engine.whole_rows import WholeRows
from vllm_dllm.ops.noise import Stream, more_keys, row_keys, uniform_tokens
from vllm_dllm.ops.row_stats import RowStatistics, row_statistics, with_samples
from vllm_dllm.ops.sampled_stats import draw
from vllm_dllm.ops.tiled_stats import Head, tiled_statistics

# Bytes of float32 temporaries that a step may hold between hidden states and statistics.
HEAD_BYTES = 256 << 20
TILE_BYTES = 32 << 20


@dataclass(frozen=True)
class Wanted:
    """The canvases of a batch, and what their algorithms need of the model's output.

    Attributes:
        slots: int64 ``[n]``, on the device.
        on_host: the same for numpy.
        adjust: ids int64 ``[n, L]`` and what to add to their logits, or None.
        ask: ids int64 ``[n, L, K]`` whose log-probabilities are needed, or None.
        entropy: whether entropies are needed.
    """

    slots: torch.Tensor
    on_host: np.ndarray
    adjust: tuple[torch.Tensor, torch.Tensor] | None = None
    ask: torch.Tensor | None = None
    entropy: bool = False


@dataclass(frozen=True)
class Rows:
    """What one forward pass says about the canvases of some slots.

    Attributes:
        statistics: row statistics ``[n, L]``.
        noise: int64 ``[n, L]``, uniform random tokens, or None where none are needed.
        soft: float32 ``[n, L, hidden]``, the soft embedding before the embedding's scale, or None.
        asked: float32 ``[n, L, K]``, log-probabilities, or None.
    """

    statistics: RowStatistics
    noise: torch.Tensor | None = None
    soft: torch.Tensor | None = None
    asked: torch.Tensor | None = None


class Statistics(Protocol):
    """Row statistics for the canvases of some slots."""

    def __call__(self, hidden: torch.Tensor, wanted: Wanted) -> Rows:
        """`Rows` of hidden states ``[n * L, hidden]``."""
        ...


class MaskedStatistics:
    """Of a masked model, from whole rows of logits, as many at a time as `HEAD_BYTES` hold.

    The mask token is never chosen.
    """

    def __init__(
        self, head: Callable[[torch.Tensor], torch.Tensor], whole: WholeRows, vocabulary: int
    ) -> None:
        self.slots = whole.slots
        mask = self.slots.kind.mask_token
        if mask is None:
            raise ValueError("masked statistics are for models with a mask token")
        self.head = head
        self.whole = whole
        self.mask_token = mask
        self.length = self.slots.length
        self.canvases = max(1, HEAD_BYTES // (4 * vocabulary * self.length))
        self.position = torch.arange(self.length, device=self.slots.device)

    def __call__(self, hidden: torch.Tensor, wanted: Wanted) -> Rows:
        """See `Statistics`."""
        parts, asked = [], []
        for first in range(0, len(wanted.slots), self.canvases):
            some = slice(first, first + self.canvases)
            rows = hidden[first * self.length : (first + self.canvases) * self.length]
            logits = self.head(rows)
            if wanted.adjust is not None:
                ids, amount = (part[some].reshape(-1, 1) for part in wanted.adjust)
                logits.scatter_add_(1, ids, amount.to(logits.dtype))
            parts.append(self._statistics(logits, wanted, some))
            if wanted.ask is not None:
                ids = wanted.ask[some].flatten(0, 1)  # [rows, K]
                total = logits.float().logsumexp(-1, keepdim=True)
                asked.append(logits.gather(1, ids).float() - total)
        statistics = type(parts[0]).join(parts).view(-1, self.length)
        if not asked:
            return Rows(statistics)
        return Rows(statistics, asked=torch.cat(asked).view(*statistics.token.shape, -1))

    def _statistics(self, logits: torch.Tensor, wanted: Wanted, some: slice) -> RowStatistics:
        """Of some canvases' logits ``[n * L, vocabulary]``, which are overwritten."""
        slots, on_host = wanted.slots[some], wanted.on_host[some]
        whole = self.whole
        if not whole.processed:
            whole.remember(logits, on_host)
        whole.shape(logits, on_host)
        greedy = row_statistics(logits, self.mask_token, wanted.entropy)
        if not self.slots.samples[on_host].any():
            if whole.processed:
                whole.remember(logits, on_host)
            return greedy
        state = self.slots
        temperature = state.temperature[slots].repeat_interleave(self.length)
        keys = row_keys(state.seed[slots], state.start[slots], state.step[slots].long())
        candidates = more_keys(keys[:, None], self.position, Stream.CANDIDATE).flatten()
        scaled = logits.float() / torch.where(temperature > 0, temperature, 1.0)[:, None]
        scaled[:, self.mask_token] = -torch.inf
        filtered = whole.filter(scaled, on_host)
        if whole.processed:
            whole.remember(filtered, on_host)
        return with_samples(greedy, scaled, temperature, draw(filtered, candidates))


class TiledStatistics:
    """Of a model of uniform noise, over tiles of the vocabulary, with the soft embedding.

    Requests that need whole rows take a second pass of their own, see `WholeRows`.
    """

    def __init__(self, head: Head, whole: WholeRows) -> None:
        self.whole = whole
        self.head = head
        self.state = whole.slots
        self.position = torch.arange(self.state.length, device=self.state.device)

    def __call__(self, hidden: torch.Tensor, wanted: Wanted) -> Rows:
        """See `Statistics`."""
        state, slots = self.state, wanted.slots
        temperature = self._temperature(wanted)
        keys = row_keys(state.seed[slots], state.start[slots], state.step[slots].long())  # [n]
        candidates = more_keys(keys[:, None], self.position, Stream.CANDIDATE)  # [n, L]
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
            draws = temperature, candidates
            self.whole.refine(statistics, soft, hidden, draws, wanted.on_host)
        noise = uniform_tokens(more_keys(keys, Stream.RENOISE), state.length, self.head.vocabulary)
        return Rows(statistics, noise, soft)

    def _temperature(self, wanted: Wanted) -> torch.Tensor:
        """Of this step, float32 ``[n]``."""
        state = self.state
        found = state.temperature[wanted.slots]
        for bank, index in state.groups(wanted.on_host):
            slots = wanted.slots if index is None else wanted.slots[index]
            of_request = found if index is None else found[index]
            progress = state.step[slots], state.schedule_steps[slots]
            parameters = {name: tensor[slots] for name, tensor in bank.parameters.items()}
            tempered = bank.algorithm.temperature(of_request, progress, parameters)
            found = tempered if index is None else found.index_copy(0, index, tempered)
        return found
