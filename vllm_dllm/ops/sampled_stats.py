"""Row statistics with a sample, and the soft embedding, over tiles of the vocabulary.

`sampled_statistics` is the plain reference on whole rows of logits. `tiled_statistics`
computes the same from tiles that exist one at a time, in one pass: running maxima, a running
sum of exponentials and a running sum of embeddings that are rescaled whenever the maximum
grows (online softmax; Milakov and Gimelshein, 2018). Peak memory is a tile's, whatever the
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_dllm.ops.noise import gumbel
from vllm_dllm.ops.row_stats import RowStatistics

# Float32 values of a tile's size that are alive together in one pass (logits, scaled logits,
# weights, noise and their temporaries).
TILE_COPIES = 6
MAX_ROWS = 2048


@dataclass(frozen=True)
class SampledStatistics(RowStatistics):
    """Row statistics of the tempered distribution; every field has the shape of the rows.

    Attributes:
        sample: int64, a Gumbel-max draw.
        sample_probability: float32, its probability.
        entropy: float32, nats.

    `token` and `probability` are the argmax and its probability at the row's temperature. At
    temperature 0 the distribution is the argmax alone: the sample is the argmax, its probability
    1 and the entropy 0.
    """

    sample: torch.Tensor
    sample_probability: torch.Tensor
    entropy: torch.Tensor

    def view(self, *shape: int) -> SampledStatistics:
        """The same statistics in another shape, e.g. ``[slots, L]``."""
        return SampledStatistics(*(getattr(self, name).view(*shape) for name in _FIELDS))


_FIELDS = ("token", "probability", "sample", "sample_probability", "entropy")


def sampled_statistics(
    logits: torch.Tensor, temperature: torch.Tensor, keys: torch.Tensor
) -> tuple[SampledStatistics, torch.Tensor]:
    """The reference: whole rows at once.

    Args:
        logits: ``[rows, vocabulary]``; -inf excludes a token, not all of a row may be.
        temperature: float32 ``[rows]``, at least 0.
        keys: int64 ``[rows]``, see `noise.row_keys`.

    Returns:
        Statistics of shape ``[rows]``, and the distribution ``[rows, vocabulary]`` in float32.
        Ties go to the lowest token id.
    """
    greedy = temperature == 0
    scaled = logits.float() / torch.where(greedy, 1.0, temperature)[:, None]
    token = scaled.argmax(-1)
    noise = gumbel(keys, torch.arange(logits.shape[-1], device=logits.device))
    sample = torch.where(greedy, token, (scaled + noise).argmax(-1))
    probability = scaled.softmax(-1)
    certain = torch.nn.functional.one_hot(token, logits.shape[-1]).float()
    probability = torch.where(greedy[:, None], certain, probability)
    entropy = -torch.xlogy(probability, probability).sum(-1)
    pick = [probability.gather(1, ids[:, None])[:, 0] for ids in (token, sample)]
    return SampledStatistics(token, pick[0], sample, pick[1], entropy), probability


@dataclass(frozen=True)
class Head:
    """A head that is computed a tile at a time.

    Attributes:
        logits: (hidden states ``[rows, hidden]``, first id, behind the last id) to float32
            logits ``[rows, ids]``, soft cap included.
        vocabulary: number of ids.
        embedding: ``[vocabulary, hidden]`` for the soft embedding, or None for none.
    """

    logits: Callable[[torch.Tensor, int, int], torch.Tensor]
    vocabulary: int
    embedding: torch.Tensor | None = None


def tile_shape(rows: int, vocabulary: int, budget: int) -> tuple[int, int]:
    """(rows, ids) that may be in flight together within `budget` bytes of float32 temporaries."""
    rows = max(1, min(rows, MAX_ROWS))
    ids = budget // (4 * TILE_COPIES * rows)
    return rows, max(1, min(vocabulary, ids))


def tiled_statistics(
    hidden: torch.Tensor,
    head: Head,
    temperature: torch.Tensor,
    keys: torch.Tensor,
    budget: int,
) -> tuple[SampledStatistics, torch.Tensor | None]:
    """What `sampled_statistics` computes, without ever holding a row of logits.

    Args:
        hidden: ``[rows, hidden]``, at least one row.
        head: the head, see `Head`.
        temperature: float32 ``[rows]``, at least 0.
        keys: int64 ``[rows]``, see `noise.row_keys`.
        budget: bytes that temporaries may take.

    Returns:
        Statistics of shape ``[rows]``, and ``distribution @ embedding`` (float32
        ``[rows, hidden]``), or None without an embedding.
    """
    rows, ids = tile_shape(len(hidden), head.vocabulary, budget)
    parts = []
    for chunk in zip(hidden.split(rows), temperature.split(rows), keys.split(rows), strict=True):
        running = _Running(*chunk, head)
        for first in range(0, head.vocabulary, ids):
            running.add(first, min(first + ids, head.vocabulary))
        parts.append(running.result())
    if len(parts) == 1:
        return parts[0]
    fields = [torch.cat([getattr(part, name) for part, _ in parts]) for name in _FIELDS]
    soft = None if head.embedding is None else torch.cat([s for _, s in parts if s is not None])
    return SampledStatistics(*fields), soft


class _Running:
    """The state of one pass over the vocabulary, for some rows."""

    def __init__(
        self, hidden: torch.Tensor, temperature: torch.Tensor, keys: torch.Tensor, head: Head
    ) -> None:
        rows, device = len(hidden), hidden.device
        self.hidden, self.head, self.keys = hidden, head, keys
        self.greedy = temperature == 0
        self.divisor = torch.where(self.greedy, 1.0, temperature)[:, None]

        def full(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.full((rows,), value, dtype=dtype, device=device)

        self.best, self.token = full(-torch.inf), full(0, torch.int64)
        self.best_noisy, self.sample = full(-torch.inf), full(0, torch.int64)
        self.sample_scaled = full(-torch.inf)
        self.sum, self.weighted = full(0.0), full(0.0)
        width = 0 if head.embedding is None else head.embedding.shape[1]
        self.soft = torch.zeros((rows, width), device=device)

    def add(self, first: int, end: int) -> None:
        """Fold the ids ``first..end`` in."""
        scaled = self.head.logits(self.hidden, first, end) / self.divisor  # [rows, ids]
        best, at = scaled.max(-1)
        grown = torch.maximum(self.best, best)
        self.token = torch.where(best > self.best, at + first, self.token)
        # Sums are relative to the running maximum; a row that saw only -inf has none yet.
        origin = torch.where(grown == -torch.inf, 0.0, grown)
        shrink = torch.exp(self.best - origin)
        self.weighted = self._shifted_weighted(shrink, origin)
        self._sample(scaled, first, end)
        weight = torch.exp(scaled - origin[:, None])
        self.sum = self.sum * shrink + weight.sum(-1)
        distance = torch.where(weight > 0, scaled - origin[:, None], 0.0)
        self.weighted += (weight * distance).sum(-1)
        if self.head.embedding is not None:
            tile = self.head.embedding[first:end].float()
            self.soft = self.soft.mul_(shrink[:, None]).addmm_(weight, tile)
        self.best = grown

    def _shifted_weighted(self, shrink: torch.Tensor, origin: torch.Tensor) -> torch.Tensor:
        """Sum of weight * (logit - origin) when the origin moves up."""
        moved = torch.where(self.best == -torch.inf, 0.0, self.best - origin)
        return shrink * (self.weighted + self.sum * moved)

    def _sample(self, scaled: torch.Tensor, first: int, end: int) -> None:
        ids = torch.arange(first, end, device=scaled.device)
        noisy, at = gumbel(self.keys, ids).add_(scaled).max(-1)
        better = noisy > self.best_noisy
        self.sample = torch.where(better, at + first, self.sample)
        chosen = scaled.gather(1, at[:, None])[:, 0]
        self.sample_scaled = torch.where(better, chosen, self.sample_scaled)
        self.best_noisy = torch.maximum(self.best_noisy, noisy)

    def result(self) -> tuple[SampledStatistics, torch.Tensor | None]:
        """Statistics and soft embedding of all ids folded in so far."""
        greedy = self.greedy
        statistics = SampledStatistics(
            token=self.token,
            probability=torch.where(greedy, 1.0, 1.0 / self.sum),
            sample=torch.where(greedy, self.token, self.sample),
            sample_probability=torch.where(
                greedy, 1.0, torch.exp(self.sample_scaled - self.best) / self.sum
            ),
            entropy=torch.where(greedy, 0.0, self.sum.log() - self.weighted / self.sum),
        )
        if self.head.embedding is None:
            return statistics, None
        certain = self.head.embedding[self.token].float()
        return statistics, torch.where(greedy[:, None], certain, self.soft / self.sum[:, None])
