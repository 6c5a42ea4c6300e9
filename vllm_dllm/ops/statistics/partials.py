"""What a pass over the ids found, and how the findings of several ranks become one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_dllm.ops.statistics.head import Shard
from vllm_dllm.ops.statistics.sampled import SampledStatistics


@dataclass(frozen=True)
class Found:
    """What a pass found.

    Attributes:
        best, token: the largest scaled logit that may be chosen, and its id; ``[rows]`` as all
            but `soft`.
        origin: what sums are relative to: the largest scaled logit of all. It differs from
            `best` only where an id takes part in the sums that may not be chosen.
        drawn, sample, scaled: the drawn group's score, the drawn id, and its scaled logit.
        sum, weighted: of exp(scaled - origin), and of that times (scaled - origin).
        soft: ``[rows, hidden]``, the sum of exp(scaled - origin) times the embedding.
    """

    best: torch.Tensor
    token: torch.Tensor
    origin: torch.Tensor
    drawn: torch.Tensor
    sample: torch.Tensor
    scaled: torch.Tensor
    sum: torch.Tensor
    weighted: torch.Tensor
    soft: torch.Tensor

    def met(self, shard: Shard) -> Found:
        """The same over the ids of all ranks; only `soft` stays this rank's share."""
        numbers = torch.stack(
            [self.best, self.origin, self.drawn, self.scaled, self.sum, self.weighted]
        )
        ids = torch.stack([self.token, self.sample]).int().view(torch.float32)
        everyone = shard.gather(torch.cat([numbers, ids]))  # [ranks, 8, rows]
        best, origins, drawn, scaled, total, weighted = everyone[:, :6].unbind(1)
        token, sample = everyone[:, 6:].contiguous().view(torch.int32).long().unbind(1)
        origin = origins.amax(0)
        share = torch.exp(origins - origin)  # [ranks, rows], 0 for a rank with nothing to add
        distance = torch.where(share > 0, origins - origin, 0.0)
        first, winner = best.argmax(0, keepdim=True), drawn.argmax(0, keepdim=True)
        return Found(
            best=best.amax(0),
            token=token.gather(0, first)[0],
            origin=origin,
            drawn=drawn.gather(0, winner)[0],
            sample=sample.gather(0, winner)[0],
            scaled=scaled.gather(0, winner)[0],
            sum=(share * total).sum(0),
            weighted=(share * (weighted + total * distance)).sum(0),
            soft=self.soft * torch.exp(self.origin - origin)[:, None],
        )

    def statistics(self, greedy: torch.Tensor) -> SampledStatistics:
        """Of the ids found here; rows where `greedy`, bool ``[rows]``, are sure of the argmax."""
        return SampledStatistics(
            token=self.token,
            probability=torch.where(greedy, 1.0, torch.exp(self.best - self.origin) / self.sum),
            sample=torch.where(greedy, self.token, self.sample),
            sample_probability=torch.where(
                greedy, 1.0, torch.exp(self.scaled - self.origin) / self.sum
            ),
            entropy=torch.where(greedy, 0.0, self.sum.log() - self.weighted / self.sum),
        )
