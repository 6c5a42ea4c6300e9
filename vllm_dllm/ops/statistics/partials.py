"""Partial results of a pass over the vocabulary, and how those of several ranks are merged.

A token is drawn in two stages, so that only one random number is needed for `GROUP` ids: first a
group of `GROUP` consecutive ids, by Gumbel-max over the groups' log-sum-exps, then an id of that
group, by Gumbel-max over its logits. The product of the two probabilities is that of the softmax
(the maximum of Gumbel variables is Gumbel distributed around their log-sum-exp; Maddison et al.,
2014).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from vllm_dllm.ops.noise.keyed import gumbel
from vllm_dllm.ops.statistics.head import Head, Shard
from vllm_dllm.ops.statistics.rows import SampledStatistics

GROUP = 64
# Groups draw with the same keys as ids, so their indices must be larger than those of all ids.
FIRST_GROUP_INDEX = 1 << 30


def grouped(scaled: torch.Tensor) -> torch.Tensor:
    """``[rows, ids]`` as ``[rows, groups, GROUP]``, with the last group padded with -inf."""
    missing = -scaled.shape[1] % GROUP
    if missing:
        scaled = torch.nn.functional.pad(scaled, (0, missing), value=-torch.inf)
    return scaled.view(len(scaled), scaled.shape[1] // GROUP, GROUP)


def take_group(groups: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """One group of each row: ``[rows, GROUP]`` for an index int64 ``[rows]``."""
    return groups.gather(1, index[:, None, None].expand(-1, 1, GROUP))[:, 0]


def group_noise(keys: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Gumbel noise ``[rows, groups]`` of the groups that begin at ``starts`` (int64 ``[groups]``).

    A group's noise depends on its first id, so no two groups have the same noise, wherever a rank's
    part of the vocabulary begins.
    """
    return gumbel(keys, FIRST_GROUP_INDEX + starts)


def draw_in_group(
    group: torch.Tensor, first: torch.Tensor, keys: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw an id from one group of each row.

    Args:
        group: float32 ``[rows, GROUP]``, scaled logits.
        first: int64 ``[rows]``, the first ids of the groups.
        keys: int64 ``[rows]``, see `noise.row_keys`.

    Returns:
        The drawn ids, int64 ``[rows]``, and their scaled logits, float32 ``[rows]``.
    """
    ids = first[:, None] + torch.arange(GROUP, device=group.device)  # [rows, GROUP]
    index = (group + gumbel(keys, ids)).argmax(-1)
    return first + index, group.gather(1, index[:, None])[:, 0]


def add_product(total: torch.Tensor, weight: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
    """``total + weight @ embedding`` in float32; `total` may be overwritten.

    A GPU multiplies 16-bit numbers an order of magnitude faster than float32 numbers, so there the
    weights (at most 1) are rounded to the embedding's dtype, as the model's own probabilities are.
    The products are summed in float32.

    Args:
        total: float32 ``[rows, hidden]``.
        weight: float32 ``[rows, ids]``.
        embedding: ``[ids, hidden]``, any floating dtype.
    """
    dtype = embedding.dtype
    if dtype == torch.float32 or total.device.type == "cpu":
        return total.addmm_(weight, embedding.float())
    if torch.version.hip is not None:
        # PyTorch has no product of this kind on ROCm: the sum over one tile is rounded to `dtype`.
        return total.add_(weight.to(dtype) @ embedding)
    return torch.addmm(total, weight.to(dtype), embedding, out_dtype=torch.float32)


def average(head: Head, distribution: torch.Tensor) -> torch.Tensor:
    """``distribution @ embedding`` over the ids of all ranks.

    Args:
        head: a head with an embedding.
        distribution: float32 ``[rows, vocabulary]``.

    Returns:
        Float32 ``[rows, hidden]``.

    Raises:
        ValueError: the head has no embedding.
    """
    if head.embedding is None:
        raise ValueError("this head has no embedding")
    own = distribution[:, head.ids.start : head.ids.stop]
    soft = add_product(own.new_zeros((len(own), head.embedding.shape[1])), own, head.embedding)
    return soft if head.shard is None else head.shard.sum(soft)


def soft_embedding(
    head: Head,
    statistics: SampledStatistics,
    greedy: torch.Tensor,
    soft: torch.Tensor,
    total: torch.Tensor,
) -> torch.Tensor:
    """The soft embedding of all ranks, from this rank's sums of weighted embeddings.

    Args:
        head: a head with an embedding.
        statistics: ``[rows]``; a greedy row is the embedding of its likeliest token.
        greedy: bool ``[rows]``.
        soft: float32 ``[rows, hidden]``, see `SoftmaxPartials`.
        total: float32 ``[rows]``, the sum of all ranks' weights.

    Returns:
        Float32 ``[rows, hidden]``.
    """
    assert head.embedding is not None
    mean, certain = soft / total[:, None], greedy[:, None]
    if head.shard is None:
        return torch.where(certain, head.embedding[statistics.token].float(), mean)
    return head.shard.sum(torch.where(certain, head.embed(statistics.token), mean))


@dataclass
class LeadingGroup:
    """The group with the highest score so far in each row.

    Attributes:
        score: float32 ``[rows]``.
        first: int64 ``[rows]``, the first id of the group.
        group: float32 ``[rows, GROUP]``, the scaled logits of the group.
    """

    score: torch.Tensor
    first: torch.Tensor
    group: torch.Tensor

    def compete(self, scores: torch.Tensor, groups: torch.Tensor, starts: torch.Tensor) -> None:
        """Replace the current group with a tile's best group where that has a higher score.

        Args:
            scores: float32 ``[rows, groups]``.
            groups: float32 ``[rows, groups, GROUP]``, scaled logits.
            starts: int64 ``[groups]``, the first ids of the groups.
        """
        score, index = scores.max(-1)
        better = score > self.score
        self.first = torch.where(better, starts[index], self.first)
        self.group = torch.where(better[:, None], take_group(groups, index), self.group)
        self.score = torch.maximum(self.score, score)


class RunningPass(Protocol):
    """A pass over the vocabulary; sums are as in `SoftmaxPartials`.

    Attributes:
        keys: int64 ``[rows]``, see `draw_in_group`.
        likeliest, drawn: the groups of the likeliest id and of the drawn one.
    """

    keys: torch.Tensor
    likeliest: LeadingGroup
    drawn: LeadingGroup
    sum: torch.Tensor
    weighted: torch.Tensor
    soft: torch.Tensor


@dataclass(frozen=True)
class SoftmaxPartials:
    """The results of one rank's pass over its ids; ``[rows]`` each, except for `soft`.

    Attributes:
        best, token: the largest scaled logit that may be chosen, and its id.
        origin: the largest scaled logit of all, which the sums are relative to. It differs from
            `best` only if an id that may not be chosen takes part in the sums.
        drawn, sample, scaled: the drawn group's score, the drawn id, and its scaled logit.
        sum, weighted: the sum of exp(scaled - origin), and of that times (scaled - origin).
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

    @classmethod
    def of(cls, running: RunningPass) -> SoftmaxPartials:
        """Collect the results of a pass in which every id may be chosen."""
        likeliest, drawn = running.likeliest, running.drawn
        sample, scaled = draw_in_group(drawn.group, drawn.first, running.keys)
        return cls(
            best=likeliest.score,
            token=likeliest.first + likeliest.group.argmax(-1),
            origin=likeliest.score,
            drawn=drawn.score,
            sample=sample,
            scaled=scaled,
            sum=running.sum,
            weighted=running.weighted,
            soft=running.soft,
        )

    def merge_ranks(self, shard: Shard) -> SoftmaxPartials:
        """The results over the ids of all ranks; only `soft` remains this rank's share."""
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
            soft=self.soft * torch.exp(self.origin - origin)[:, None],
        )

    def statistics(self, greedy: torch.Tensor) -> SampledStatistics:
        """Statistics ``[rows]``; where `greedy` is true (bool ``[rows]``) the argmax is certain."""
        return SampledStatistics(
            token=self.token,
            probability=torch.where(greedy, 1.0, torch.exp(self.best - self.origin) / self.sum),
            sample=torch.where(greedy, self.token, self.sample),
            sample_probability=torch.where(
                greedy, 1.0, torch.exp(self.scaled - self.origin) / self.sum
            ),
            entropy=torch.where(greedy, 0.0, self.sum.log() - self.weighted / self.sum),
        )
