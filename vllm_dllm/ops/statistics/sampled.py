"""Row statistics with a draw, from whole rows of logits, in plain PyTorch.

A token is drawn in two stages, so that only one random number is needed for `GROUP` ids: first a
group, by Gumbel-max over the groups' log-sum-exps, then an id of that group, by Gumbel-max over its
logits. The product of the two probabilities is that of the softmax (the maximum of Gumbel variables
is Gumbel distributed around their log-sum-exp; Maddison et al., 2014).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from vllm_dllm.ops.noise.keyed import gumbel
from vllm_dllm.ops.statistics.head import Head
from vllm_dllm.ops.statistics.partials import SoftmaxPartials
from vllm_dllm.ops.statistics.rows import (
    FAR,
    GROUP,
    RowStatistics,
    group_starts,
    grouped,
    take_group,
)

# Groups draw with the same keys as ids, so their indices must be larger than those of all ids.
FIRST_GROUP_INDEX = 1 << 30
_LOG2_E = 1.4426950408889634


def sampled_partials(
    scores: torch.Tensor, temperature: torch.Tensor, keys: torch.Tensor, starts: torch.Tensor
) -> tuple[SoftmaxPartials, torch.Tensor]:
    """The results of a pass over this rank's scores, and their weights ``[rows, ids or more]``.

    A weight is ``exp((score - largest) / temperature)``. Scores are float32 ``[rows, ids]``; -inf
    excludes a token, but not all tokens of a row. `temperature` is float32 ``[rows]``, at least 0,
    and for `keys` see `noise.keyed.row_keys`. Ties go to the lowest id. `starts` are the groups'
    first ids (`group_starts`), in memory: the compiler would make an index of a range, and what
    follows an overflow of its products is undefined in C++.
    """
    scaled = scores / torch.where(temperature == 0, 1.0, temperature)[:, None]
    groups = grouped(scaled)
    top, likeliest = groups.amax(-1).max(-1)
    # A rank may have nothing but -inf.
    origin = torch.where(top == -torch.inf, 0.0, top)
    distance = (groups - origin[:, None, None]).clamp_min_(FAR)
    weight = distance.exp()  # [rows, groups, GROUP]
    mass = weight.sum(-1)
    drawn, chosen = (mass.log() + origin[:, None] + group_noise(keys, starts)).max(-1)
    sample, of_sample = draw_in_group(take_group(groups, chosen), starts[chosen], keys)
    found = SoftmaxPartials(
        best=top,
        token=starts[likeliest] + take_group(groups, likeliest).argmax(-1),
        origin=top,
        drawn=drawn,
        sample=sample,
        scaled=of_sample,
        sum=mass.sum(-1),
        # In place, because the distances are no longer needed.
        weighted=distance.mul_(weight).flatten(1).sum(-1),
    )
    return found, weight.flatten(1)


def product(weight: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
    """``weight @ embedding``, summed in float32, ``[rows, hidden]``.

    A GPU multiplies 16-bit numbers an order of magnitude faster than float32 numbers, so there the
    weights (at most 1) are rounded to the embedding's dtype, as the model's own probabilities are.
    """
    dtype = embedding.dtype
    if dtype == torch.float32 or weight.device.type == "cpu":
        return weight.float() @ embedding.float()
    if torch.version.hip is not None:  # PyTorch has no product of this kind on ROCm
        return (weight.to(dtype) @ embedding).float()
    return torch.mm(weight.to(dtype), embedding, out_dtype=torch.float32)


def soft_embedding(
    weight: torch.Tensor,
    head: Head,
    temperature: torch.Tensor,
    own: SoftmaxPartials,
    merged: SoftmaxPartials,
) -> torch.Tensor:
    """``softmax(scores / temperature) @ embedding`` over the ids of all ranks, float32.

    Args:
        weight: the weights of `sampled_partials`, of all ids or of this rank's.
        head: the head; only its `embedding`, ids and shard are read.
        temperature: float32 ``[rows]``. Rows at 0 are the embedding of their token.
        own: the results that came with the weights.
        merged: the same over all ranks.
    """
    assert head.embedding is not None
    first = head.ids.start if head.shard is not None and weight.shape[1] >= head.vocabulary else 0
    soft = product(weight[:, first : first + len(head.ids)], head.embedding)
    if own is not merged:
        soft = soft * torch.exp(own.origin - merged.origin)[:, None]
    greedy = (temperature == 0)[:, None]
    mean = torch.where(greedy, head.embed(merged.token), soft / merged.sum[:, None])
    return mean if head.shard is None else head.shard.sum(mean)


def draw(scaled: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Draw ids, int64 ``[rows]``, from ``softmax(scaled)``.

    `scaled` are logits divided by the temperature, float32 ``[rows, vocabulary]``.
    """
    return _draw(scaled, keys)[0]


def draw_and_sum(scaled: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`draw`, and the log-sum-exp of each row, float32 ``[rows]``; both read the rows once."""
    token, by_group = _draw(scaled, keys)
    return token, _logsumexp(by_group)


def _draw(scaled: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The drawn ids, and the log-sum-exp of each group, float32 ``[rows, groups]``."""
    groups = grouped(scaled)
    by_group = _logsumexp(groups)
    score = by_group + group_noise(keys, group_starts(0, scaled.shape[1], keys.device))
    chosen = score.argmax(-1)
    token = draw_in_group(take_group(groups, chosen), chosen * GROUP, keys)[0]
    return token, by_group


def _logsumexp(x: torch.Tensor) -> torch.Tensor:
    """The log-sum-exp over the last dimension of float32 ``[..., k]``.

    On a CPU it is computed to base 2, because `exp2` is several times as fast as `exp` there.
    """
    if x.device.type != "cpu":
        return x.logsumexp(-1)
    # The difference of two -inf would be NaN.
    origin = x.amax(-1).clamp_min_(-1e38)
    return (x - origin[..., None]).mul_(_LOG2_E).exp2_().sum(-1).log_().add_(origin)


def group_noise(keys: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Gumbel noise ``[rows, groups]`` of the groups that begin at ``starts`` (int64 ``[groups]``).

    It depends on a group's first id alone, wherever a rank's part of the vocabulary begins.
    """
    return gumbel(keys, FIRST_GROUP_INDEX + starts)


def draw_in_group(
    group: torch.Tensor, first: torch.Tensor, keys: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw an id from one group of each row; returns ids and their scaled logits, ``[rows]``.

    `group` are scaled logits, float32 ``[rows, GROUP]``, and `first` the groups' first ids.
    """
    ids = first[:, None] + torch.arange(GROUP, device=group.device)  # [rows, GROUP]
    index = (group + gumbel(keys, ids)).argmax(-1)
    return first + index, group.gather(1, index[:, None])[:, 0]


def drawn_weight(greedy: RowStatistics, scaled: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """The weight of drawn tokens relative to the argmax, ``exp((logit - largest) / temperature)``.

    It is float32 ``[rows]``. `scaled` are logits divided by the temperature, or by 1 where that is
    0, ``[rows, vocabulary]``.
    """
    weight = (scaled.gather(1, drawn[:, None]) - scaled.gather(1, greedy.token[:, None])).exp()
    return weight[:, 0].float()


def drawn_logprob(
    greedy: RowStatistics, weight: torch.Tensor, temperature: torch.Tensor
) -> torch.Tensor:
    """The log-probabilities of drawn tokens at temperature 1, float32 ``[rows]``.

    They are ``log p(argmax) + temperature * log(weight)``, so the rows are not read again. Rows at
    temperature 0 have the argmax.
    """
    likeliest = greedy.probability.log()
    return torch.where(temperature > 0, likeliest + temperature * weight.log(), likeliest)


def with_drawn(
    greedy: RowStatistics,
    weight: torch.Tensor,
    sampled: torch.Tensor,
    drawn: torch.Tensor,
    own_confidence_temperature: torch.Tensor | None = None,
    share: torch.Tensor | None = None,
) -> RowStatistics:
    """Statistics with drawn tokens in place of the most likely ones, and with their confidence.

    A drawn token's confidence is the smaller of the argmax' probability and its own weight. So a
    token that is as likely as the argmax has the same confidence. If the (small) probability of the
    drawn token itself were used, thresholds would pass only one token per step.

    Args:
        greedy: statistics of shape ``[rows]``, as those of all arguments.
        weight: float32, see `drawn_weight`.
        sampled: bool, rows whose token is drawn; the others stay as they are.
        drawn: int64, the tokens.
        own_confidence_temperature: float32 ``[rows]``, the temperature of rows whose drawn token's
            confidence is its own probability at temperature 1 (`Algorithm.own_confidence`), and 0
            for the others; None if there are none. The probability is
            ``exp(largest - logsumexp) * weight**temperature``.
        share: float32 ``[rows]``, the argmax' probability at the temperature of draws, if a drawn
            token's confidence is its own one there; else None.
    """
    sure = torch.minimum(greedy.probability, weight)
    if own_confidence_temperature is not None:
        sure = torch.where(
            own_confidence_temperature > 0,
            greedy.probability * weight**own_confidence_temperature,
            sure,
        )
    if share is not None:
        sure = share * weight
    return replace(
        greedy,
        token=torch.where(sampled, drawn, greedy.token),
        probability=torch.where(sampled, sure, greedy.probability),
    )
