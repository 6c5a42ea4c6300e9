"""Row statistics with a draw, from whole rows of logits: the plain reference.

A token is drawn in two stages, so that only one random number is needed for `GROUP` ids: first a
group, by Gumbel-max over the groups' log-sum-exps, then an id of that group, by Gumbel-max over its
logits. The product of the two probabilities is that of the softmax (the maximum of Gumbel variables
is Gumbel distributed around their log-sum-exp; Maddison et al., 2014).

`tiled` computes the same without ever holding a whole row.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from vllm_dllm.ops.noise.keyed import gumbel
from vllm_dllm.ops.statistics.rows import (
    GROUP,
    RowStatistics,
    SampledStatistics,
    group_starts,
    grouped,
    take_group,
)

# Groups draw with the same keys as ids, so their indices must be larger than those of all ids.
FIRST_GROUP_INDEX = 1 << 30
_LOG2_E = 1.4426950408889634


def sampled_statistics(
    logits: torch.Tensor, temperature: torch.Tensor, keys: torch.Tensor
) -> tuple[SampledStatistics, torch.Tensor]:
    """Statistics ``[rows]`` and float32 probabilities ``[rows, vocabulary]`` at a temperature.

    -inf excludes a token, but not all tokens of a row. `temperature` is float32 ``[rows]``, at
    least 0; for `keys` see `noise.row_keys`. Ties go to the lowest token id.
    """
    greedy = temperature == 0
    scaled = logits.float() / torch.where(greedy, 1.0, temperature)[:, None]
    token = scaled.argmax(-1)
    sample = torch.where(greedy, token, draw(scaled, keys))
    probability = scaled.softmax(-1)
    certain = torch.nn.functional.one_hot(token, logits.shape[-1]).float()
    probability = torch.where(greedy[:, None], certain, probability)
    entropy = -torch.xlogy(probability, probability).sum(-1)
    pick = [probability.gather(1, ids[:, None])[:, 0] for ids in (token, sample)]
    return SampledStatistics(token, pick[0], sample, pick[1], entropy), probability


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
    """
    sure = torch.minimum(greedy.probability, weight)
    if own_confidence_temperature is not None:
        sure = torch.where(
            own_confidence_temperature > 0,
            greedy.probability * weight**own_confidence_temperature,
            sure,
        )
    return replace(
        greedy,
        token=torch.where(sampled, drawn, greedy.token),
        probability=torch.where(sampled, sure, greedy.probability),
    )
