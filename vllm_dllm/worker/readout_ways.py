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

from vllm_dllm.constraints.decoding.best_path import CanvasWindow
from vllm_dllm.constraints.decoding.constrained_step import ConstrainedPath
from vllm_dllm.ops.compiled import compiled
from vllm_dllm.ops.noise.keyed import Counters, StepNoise, step_noise
from vllm_dllm.ops.statistics.head import Head
from vllm_dllm.ops.statistics.rows import RowStatistics, with_samples
from vllm_dllm.ops.statistics.tiled import (
    Tiled,
    compiled_statistics,
    example_budgets,
    tiled_statistics,
)
from vllm_dllm.worker.constraint_state import Drawn, Scores, follow
from vllm_dllm.worker.logits_pipeline import WholeRows
from vllm_dllm.worker.masked_kernels import (
    HEAD_BYTES,
    TILE_BYTES,
    Draws,
    MaskedKernels,
)
from vllm_dllm.worker.slots import SlotState


@dataclass(frozen=True)
class Wanted:
    """The canvases of a batch, and what their algorithms need of the model's output.

    Attributes:
        slots: int64 ``[n]``, on the device.
        on_host: the same for numpy.
        width: positions of the canvases that exist, int64 ``[n]``, or L for all.
        temperature: float32 ``[n]``, of this step; 0 is greedy.
        adjust: ids int64 ``[n, L]`` and what to add to their logits, or None.
        ask: ids int64 ``[n, L, K]`` whose log-probabilities are needed, or None.
        entropy: whether entropies are needed.
        window: of ``n`` canvases, what their constraints see of them; None where none has any.
    """

    slots: torch.Tensor
    on_host: np.ndarray
    width: torch.Tensor | int
    temperature: torch.Tensor
    adjust: tuple[torch.Tensor, torch.Tensor] | None = None
    ask: torch.Tensor | None = None
    entropy: bool = False
    window: CanvasWindow | None = None

    @property
    def full(self) -> bool:
        """All canvases are L wide."""
        return isinstance(self.width, int)


@dataclass(frozen=True)
class Rows:
    """What one forward pass says about the canvases of some slots.

    Attributes:
        statistics: row statistics ``[n, L]``.
        noise: int64 ``[n, L]``, uniform random tokens, or None where none are needed.
        fresh: the same for what the canvases behind these begin with, where these are L wide.
        soft: float32 ``[n, L, hidden]``, the soft embedding before the embedding's scale, or None.
        asked: float32 ``[n, L, K]``, log-probabilities, or None.
        path: what constraints make of the canvases, or None where none has any.
    """

    statistics: RowStatistics
    noise: torch.Tensor | None = None
    fresh: torch.Tensor | None = None
    soft: torch.Tensor | None = None
    asked: torch.Tensor | None = None
    path: ConstrainedPath | None = None


# Rows of the examples that functions are compiled with ahead of time. The compiler takes any other
# number, too, and lays its loops out for such as these: a few canvases.
EXAMPLES = 128


class Statistics(Protocol):
    """Row statistics for the canvases of some slots."""

    def warm_up(self, hidden: torch.Tensor) -> None:
        """Call what a step calls, on `EXAMPLES` hidden states; all ranks do so together."""
        ...

    def __call__(self, hidden: torch.Tensor, wanted: Wanted) -> Rows:
        """`Rows` of hidden states ``[n * L, hidden]``."""
        ...


def counters(state: SlotState, slots: torch.Tensor) -> Counters:
    """What the positions of ``slots`` (int64 ``[n]``) draw from.

    By position and not by canvas, as for a compiler one canvas would be a kind of its own.
    """
    rows = slots.repeat_interleave(state.length)
    return Counters(state.seed, state.start, state.step, rows, state.length)


def extremes(state: SlotState) -> tuple[int, int]:
    """Rows of the smallest and of the largest batch of canvases."""
    slots, length = state.tokens.shape
    return length, slots * length


class MaskedStatistics:
    """Of a masked model, from whole rows of logits, as many at a time as `HEAD_BYTES` hold.

    Kernels that need no logits are asked first, if no request of the batch does. The mask token
    is never chosen.
    """

    def __init__(
        self,
        head: Callable[[torch.Tensor], torch.Tensor],
        whole: WholeRows,
        vocabulary: int,
        kernels: MaskedKernels,
    ) -> None:
        self.kernels = kernels
        self.slots = whole.slots
        mask = self.slots.kind.mask_token
        if mask is None:
            raise ValueError("masked statistics are for models with a mask token")
        self.head = head
        self.whole = whole
        self.mask_token = mask
        self.length = self.slots.length
        self.canvases = max(1, HEAD_BYTES // (4 * vocabulary * self.length))

    def __call__(self, hidden: torch.Tensor, wanted: Wanted) -> Rows:
        """See `Statistics`."""
        if not self._needs_rows(wanted):
            found = self._of_hidden(hidden, wanted)
            if found is not None:
                return Rows(found.view(-1, self.length))
        parts, asked = [], []
        path = None
        if wanted.window is not None:
            path = ConstrainedPath.empty(wanted.window)
        for first in range(0, len(wanted.slots), self.canvases):
            some = slice(first, first + self.canvases)
            rows = hidden[first * self.length : (first + self.canvases) * self.length]
            logits = self.head(rows)
            if wanted.adjust is not None:
                ids, amount = (part[some].reshape(-1, 1) for part in wanted.adjust)
                logits.scatter_add_(1, ids, amount.to(logits.dtype))
            parts.append(self._statistics(logits, wanted, some, path))
            if wanted.ask is not None:
                ids = wanted.ask[some].flatten(0, 1)  # [rows, K]
                total = logits.float().logsumexp(-1, keepdim=True)
                asked.append(logits.gather(1, ids).float() - total)
        statistics = type(parts[0]).join(parts).view(-1, self.length)
        if not asked:
            return Rows(statistics, path=path)
        log_p = torch.cat(asked).view(*statistics.token.shape, -1)
        return Rows(statistics, asked=log_p, path=path)

    def warm_up(self, hidden: torch.Tensor) -> None:
        """See `Statistics`."""
        functions, logits = self.kernels.functions, self.head(hidden)
        for entropy in (False, True):
            self.kernels.rows(logits, self.mask_token, entropy)
        functions.keys(counters(self.slots, torch.tensor([0], device=hidden.device)))
        # In a tensor of their own, as in a step: a head may give a part of a wider one.
        scaled = logits.float().contiguous()
        functions.draw(scaled, torch.arange(len(hidden), device=hidden.device))
        self.kernels.warm_up(hidden, self.mask_token, extremes(self.slots))

    def _needs_rows(self, wanted: Wanted) -> bool:
        """Whether a request of the batch needs a row of logits for more than a choice or a draw."""
        needed = any(part is not None for part in (wanted.adjust, wanted.ask, wanted.window))
        return needed or bool(self.whole.asked(wanted.on_host))

    def _of_hidden(self, hidden: torch.Tensor, wanted: Wanted) -> RowStatistics | None:
        """Without logits, if the kernels can."""
        if not self.slots.samples[wanted.on_host].any():
            return self.kernels.head(hidden, self.mask_token, wanted.entropy)
        keys = self.kernels.functions.keys(counters(self.slots, wanted.slots))
        draws = Draws(wanted.temperature.repeat_interleave(self.length), keys)
        return self.kernels.drawn(hidden, self.mask_token, draws, wanted.entropy)

    def _statistics(
        self, logits: torch.Tensor, wanted: Wanted, some: slice, path: ConstrainedPath | None
    ) -> RowStatistics:
        """Of some canvases' logits ``[n * L, vocabulary]``, which are overwritten.

        Their part of ``path`` is written.
        """
        on_host, whole = wanted.on_host[some], self.whole
        if not whole.processed:
            whole.remember(logits, on_host)
        whole.shape(logits, on_host)
        greedy = self.kernels.rows(logits, self.mask_token, wanted.entropy)
        if not self.slots.samples[on_host].any():
            if whole.processed:
                whole.remember(logits, on_host)
            return self._on_path(greedy, Scores(logits), wanted, some, path)
        temperature = wanted.temperature[some].repeat_interleave(self.length)
        functions = self.kernels.functions
        keys = functions.keys(counters(self.slots, wanted.slots[some]))
        scaled = logits.float() / torch.where(temperature > 0, temperature, 1.0)[:, None]
        scaled[:, self.mask_token] = -torch.inf
        filtered = whole.filter(scaled, on_host)
        if whole.processed:
            whole.remember(filtered, on_host)
        found = with_samples(greedy, scaled, temperature, functions.draw(filtered, keys))
        candidates = keys.view(-1, self.length)
        scores = Scores(logits, Drawn(greedy, scaled, filtered, candidates))
        return self._on_path(found, scores, wanted, some, path)

    def _on_path(
        self,
        found: RowStatistics,
        scores: Scores,
        wanted: Wanted,
        some: slice,
        path: ConstrainedPath | None,
    ) -> RowStatistics:
        """With the tokens of paths in constrained canvases; `path` is of the whole batch."""
        if path is not None and wanted.window is not None:
            samples = self.slots.samples[wanted.on_host[some]]
            groups = self.slots.constraints.groups(wanted.on_host[some], samples)
            follow(found, scores, wanted.window.part(some), path.part(some), groups)
        return found


@dataclass(frozen=True)
class SampledKernels:
    """How a step of a model of uniform noise is computed.

    Attributes:
        statistics: from hidden states to statistics and soft embedding, as `tiled_statistics`.
        noise: (where positions stand, vocabulary) to random numbers, as `step_noise`.
    """

    statistics: Tiled = tiled_statistics
    noise: Callable[[Counters, int], StepNoise] = step_noise

    @classmethod
    def compiled(cls) -> SampledKernels:
        """The same functions through PyTorch's compiler."""
        return cls(compiled_statistics, compiled(step_noise))


class TiledStatistics:
    """Of a model of uniform noise, over tiles of the vocabulary, with the soft embedding.

    Requests that need whole rows take a second pass of their own, see `WholeRows`.
    """

    def __init__(self, head: Head, whole: WholeRows, kernels: SampledKernels) -> None:
        self.whole = whole
        self.head = head
        self.kernels = kernels
        self.slots = whole.slots

    def __call__(self, hidden: torch.Tensor, wanted: Wanted) -> Rows:
        """See `Statistics`."""
        state, length = self.slots, self.slots.length
        drawn = self.kernels.noise(counters(state, wanted.slots), self.head.vocabulary)
        flat, soft = self.kernels.statistics(
            hidden,
            self.head,
            wanted.temperature.repeat_interleave(length),
            drawn.keys,
            TILE_BYTES,
        )
        statistics, path = flat.view(-1, length), None
        if soft is not None:
            soft = soft.view(len(wanted.slots), length, -1)
            draws = wanted.temperature, drawn.keys.view(-1, length)
            batch = wanted.on_host, wanted.window
            path = self.whole.refine(statistics, soft, hidden, draws, batch)
        noise, fresh = (tokens.view(-1, length) for tokens in (drawn.renoise, drawn.fresh))
        return Rows(statistics, noise, fresh if wanted.full else None, soft, path=path)

    def warm_up(self, hidden: torch.Tensor) -> None:
        """See `Statistics`."""
        first = torch.tensor([0], device=hidden.device)
        self.kernels.noise(counters(self.slots, first), self.head.vocabulary)
        keys = torch.arange(len(hidden), device=hidden.device)
        temperature = torch.zeros(len(hidden), device=hidden.device)
        batches = extremes(self.slots)
        for budget in example_budgets(len(hidden), batches, self.head, TILE_BYTES):
            self.kernels.statistics(hidden, self.head, temperature, keys, budget)
