"""Partial results of a pass over the vocabulary, and how ranks that share a head merge theirs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_dllm.ops.statistics.head import Shard
from vllm_dllm.ops.statistics.rows import EntropyStatistics, RowStatistics, SampledStatistics


@dataclass(frozen=True)
class SoftmaxPartials:
    """The results of one rank's pass over its ids, each ``[rows]``."""

    best: torch.Tensor  # the largest scaled logit that may be chosen
    token: torch.Tensor  # its id
    # The largest scaled logit of all, to which the sums are relative. It differs from `best` only
    # if an id that may not be chosen takes part in the sums.
    origin: torch.Tensor
    drawn: torch.Tensor  # the drawn group's score; like the next two, the argmax' without a draw
    sample: torch.Tensor  # the drawn id
    scaled: torch.Tensor  # its scaled logit
    sum: torch.Tensor  # of exp(scaled - origin)
    weighted: torch.Tensor  # the sum of that times (scaled - origin)

    @classmethod
    def empty(cls, rows: int, device: torch.device) -> SoftmaxPartials:
        """The results of a rank that has only padding."""
        none = torch.full((rows,), -torch.inf, device=device)
        zero, token = none.new_zeros(rows), torch.zeros(rows, dtype=torch.int64, device=device)
        return cls(none, token, none, none, token, none, zero, zero)

    def merge_ranks(self, shard: Shard | None) -> SoftmaxPartials:
        """The results over the ids of all ranks; `shard` is None if there is only one."""
        if shard is None:
            return self
        numbers = torch.stack(
            [self.best, self.origin, self.drawn, self.scaled, self.sum, self.weighted]
        )
        ids = torch.stack([self.token, self.sample]).int().view(torch.float32)
        gathered = shard.gather(torch.cat([numbers, ids]))  # [ranks, 8, rows]
        best, origins, drawn, scaled, total, weighted = gathered[:, :6].unbind(1)
        token, sample = gathered[:, 6:].contiguous().view(torch.int32).long().unbind(1)
        origin = origins.amax(0)
        share = torch.exp(origins - origin)  # [ranks, rows], 0 for a rank with nothing to add
        distance = torch.where(share > 0, origins - origin, 0.0)
        first, winner = best.argmax(0, keepdim=True), drawn.argmax(0, keepdim=True)
        return SoftmaxPartials(
            best=best.amax(0),
            token=token.gather(0, first)[0],
            origin=origin,
            drawn=drawn.gather(0, winner)[0],
            sample=sample.gather(0, winner)[0],
            scaled=scaled.gather(0, winner)[0],
            sum=(share * total).sum(0),
            weighted=(share * (weighted + total * distance)).sum(0),
        )

    def greedy_statistics(self, entropy: bool) -> RowStatistics:
        """Return the result of `row_statistics`; `entropy` asks for `EntropyStatistics`."""
        probability = torch.exp(self.best - self.origin) / self.sum
        if not entropy:
            return RowStatistics(self.token, probability)
        return EntropyStatistics(self.token, probability, self._entropy())

    def sampled_statistics(self, greedy: torch.Tensor) -> SampledStatistics:
        """Statistics ``[rows]``; where `greedy` is true (bool ``[rows]``) the argmax is certain."""
        return SampledStatistics(
            token=self.token,
            probability=torch.where(greedy, 1.0, torch.exp(self.best - self.origin) / self.sum),
            sample=torch.where(greedy, self.token, self.sample),
            sample_probability=torch.where(
                greedy, 1.0, torch.exp(self.scaled - self.origin) / self.sum
            ),
            entropy=torch.where(greedy, 0.0, self._entropy()),
        )

    def _entropy(self) -> torch.Tensor:
        return self.sum.log() - self.weighted / self.sum
