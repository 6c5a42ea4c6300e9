"""A model's head, and the part of it that belongs to a rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Shard:
    """The ids of one rank, if a head is spread over ranks, and how ranks exchange tensors."""

    first: int  # the rank's first id
    end: int  # one more than the rank's last id; `first` or less for a rank that has only padding
    width: int  # number of ids of a rank including its padding, the same on all ranks
    # Maps the tensors [...] of all ranks to [ranks, ...], bit for bit.
    gather: Callable[[torch.Tensor], torch.Tensor]
    sum: Callable[[torch.Tensor], torch.Tensor]  # maps the tensors [...] of all ranks to their sum


@dataclass(frozen=True)
class Head:
    """A head that is a matrix."""

    # Maps hidden states [rows, hidden] to float32 logits [rows, ids] of this rank's ids, soft cap
    # included, which the caller may overwrite.
    logits: Callable[[torch.Tensor], torch.Tensor]
    vocabulary: int  # number of ids of all ranks together
    embedding: torch.Tensor | None = None  # [ids, hidden], this rank's, for a soft embedding
    shard: Shard | None = None  # this rank's part, or None if one rank has the whole head
    # Only fused kernels read the following two: this rank's matrix [ids or more, hidden], starting
    # at its first id, and the cap c of ``c * tanh(x / c)`` that `logits` applies.
    weight: torch.Tensor | None = None
    soft_cap: float | None = None

    @property
    def ids(self) -> range:
        """This rank's ids."""
        if self.shard is None:
            return range(self.vocabulary)
        return range(self.shard.first, max(self.shard.first, self.shard.end))

    def products(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits ``[rows, ids]`` of this rank's ids in the dtype of `weight`, without soft cap."""
        assert self.weight is not None
        return torch.nn.functional.linear(hidden, self.weight[: len(self.ids)])

    def of_all_ranks(self, own: torch.Tensor) -> torch.Tensor:
        """Logits ``[rows, vocabulary]`` from those of each rank's own ids."""
        if self.shard is None:
            return own
        missing = self.shard.width - own.shape[1]
        parts = self.shard.gather(torch.nn.functional.pad(own, (0, missing)))
        return parts.transpose(0, 1).flatten(1)[:, : self.vocabulary]

    def embed(self, token: torch.Tensor) -> torch.Tensor:
        """This rank's embeddings of tokens, float32 ``[rows, hidden]``; 0 for other ranks' ids."""
        assert self.embedding is not None
        if self.shard is None:
            return self.embedding[token].float()
        if not len(self.ids):
            return self.embedding.new_zeros((len(token), self.embedding.shape[1])).float()
        row = token - self.ids.start
        own = (row >= 0) & (row < len(self.ids))
        return torch.where(own[:, None], self.embedding[torch.where(own, row, 0)].float(), 0.0)


def logits_of(
    weight: torch.Tensor, soft_cap: float | None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Build the function `Head.logits` for this rank's matrix.

    The soft cap is applied in float32, as in the code of DiffusionGemma's authors.
    """

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        values = torch.nn.functional.linear(hidden, weight).float()
        return values if soft_cap is None else values.div_(soft_cap).tanh_().mul_(soft_cap)

    return logits
