"""A model's head that is computed a range of ids at a time, and one rank's part of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Shard:
    """One rank's ids of a head that is spread over ranks, and how the ranks meet.

    Attributes:
        first: the rank's first id.
        end: behind its last id; `first` or less for a rank that has only padding.
        width: ids of a rank with its padding, the same on all ranks.
        gather: ``[...]`` of this rank to ``[ranks, ...]``, bit for bit.
        sum: ``[...]`` to the sum over all ranks.
    """

    first: int
    end: int
    width: int
    gather: Callable[[torch.Tensor], torch.Tensor]
    sum: Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Head:
    """A head that is computed a tile at a time.

    Attributes:
        logits: (hidden states ``[rows, hidden]``, first id, behind the last id) to float32
            logits ``[rows, ids]``, soft cap included; a tensor that the caller may overwrite.
            The ids are those of this rank.
        vocabulary: number of ids, over all ranks.
        embedding: ``[ids, hidden]`` of this rank for the soft embedding, or None for none.
        shard: this rank's part, or None where one rank has all.
        weight: ``[ids or more, hidden]`` of this rank, what `logits` multiplies hidden states
            with, from this rank's first id on (rows behind its last id are not read); None where
            the head is no plain matrix. Only fused kernels read it.
        soft_cap: the cap c of ``c * tanh(x / c)`` that `logits` applies, or None for none; for
            fused kernels as `weight`.
    """

    logits: Callable[[torch.Tensor, int, int], torch.Tensor]
    vocabulary: int
    embedding: torch.Tensor | None = None
    shard: Shard | None = None
    weight: torch.Tensor | None = None
    soft_cap: float | None = None

    @property
    def ids(self) -> range:
        """This rank's ids."""
        if self.shard is None:
            return range(self.vocabulary)
        return range(self.shard.first, max(self.shard.first, self.shard.end))

    def part(self, first: int, end: int) -> torch.Tensor | None:
        """The embedding of this rank's ids ``first..end``, ``[ids, hidden]``."""
        begin = self.ids.start
        return None if self.embedding is None else self.embedding[first - begin : end - begin]

    def whole(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits ``[rows, vocabulary]`` of all ranks' ids."""
        own = self.logits(hidden, self.ids.start, self.ids.stop)
        if self.shard is None:
            return own
        missing = self.shard.width - own.shape[1]
        parts = self.shard.gather(torch.nn.functional.pad(own, (0, missing)))
        return parts.transpose(0, 1).flatten(1)[:, : self.vocabulary]

    def average(self, distribution: torch.Tensor) -> torch.Tensor:
        """``distribution @ embedding``, ``[rows, vocabulary]`` to ``[rows, hidden]``."""
        if self.embedding is None:
            raise ValueError("this head has no embedding")
        own = distribution[:, self.ids.start : self.ids.stop] @ self.embedding.float()
        return own if self.shard is None else self.shard.sum(own)

    def embed(self, token: torch.Tensor) -> torch.Tensor:
        """This rank's rows of the embedding, float32 ``[rows, hidden]``; 0 for other ranks' ids."""
        if self.embedding is None:
            raise ValueError("this head has no embedding")
        at = token - self.ids.start
        own = (at >= 0) & (at < len(self.ids))
        if not len(self.ids):
            return self.embedding.new_zeros((len(token), self.embedding.shape[1])).float()
        return torch.where(own[:, None], self.embedding[torch.where(own, at, 0)].float(), 0.0)


def logits_of(
    weight: torch.Tensor, first_id: int, soft_cap: float | None
) -> Callable[[torch.Tensor, int, int], torch.Tensor]:
    """Float32 logits of ``(hidden [rows, hidden], first, end)``; ids are absolute.

    The soft cap is applied in float32, as DiffusionGemma's authors do.
    """

    def logits(hidden: torch.Tensor, first: int, end: int) -> torch.Tensor:
        tile = weight[first - first_id : end - first_id]
        found = torch.nn.functional.linear(hidden, tile).float()
        return found if soft_cap is None else found.div_(soft_cap).tanh_().mul_(soft_cap)

    return logits
