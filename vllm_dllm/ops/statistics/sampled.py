"""Row statistics with a sample, on whole rows of logits: the plain reference.

`tiled_stats` computes the same without ever holding a row.

A token is drawn in two stages, so that noise costs one number in `GROUP` ids: first a group of
`GROUP` consecutive ids, by Gumbel-max over the groups' log-sum-exps, then an id of that group, by
Gumbel-max over its logits. The product of the two probabilities is the softmax's (the maximum of
Gumbel variables is Gumbel distributed around their log-sum-exp; Maddison et al., 2014).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from vllm_dllm.ops.noise.keyed import gumbel
from vllm_dllm.ops.statistics.rows import EntropyStatistics, RowStatistics

GROUP = 64
# Groups draw from the same keys as ids do, behind any id.
FIRST_GROUP_INDEX = 1 << 30


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


FIELDS = tuple(f.name for f in fields(SampledStatistics))


def wanted_of(found: SampledStatistics, entropy: bool) -> RowStatistics:
    """What a greedy algorithm reads of them: with entropies, or without."""
    if entropy:
        return EntropyStatistics(found.token, found.probability, found.entropy)
    return RowStatistics(found.token, found.probability)


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
    sample = torch.where(greedy, token, draw(scaled, keys))
    probability = scaled.softmax(-1)
    certain = torch.nn.functional.one_hot(token, logits.shape[-1]).float()
    probability = torch.where(greedy[:, None], certain, probability)
    entropy = -torch.xlogy(probability, probability).sum(-1)
    pick = [probability.gather(1, ids[:, None])[:, 0] for ids in (token, sample)]
    return SampledStatistics(token, pick[0], sample, pick[1], entropy), probability


def draw(scaled: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Ids drawn from ``softmax(scaled)``, int64 ``[rows]``, as the module's docstring says."""
    groups = grouped(scaled)
    score = groups.logsumexp(-1) + group_noise(keys, group_starts(0, scaled.shape[1], keys.device))
    chosen = score.argmax(-1)
    return draw_in_group(take_group(groups, chosen), chosen * GROUP, keys)[0]


def grouped(scaled: torch.Tensor) -> torch.Tensor:
    """``[rows, ids]`` as ``[rows, groups, GROUP]``, the last group filled up with -inf."""
    missing = -scaled.shape[1] % GROUP
    if missing:
        scaled = torch.nn.functional.pad(scaled, (0, missing), value=-torch.inf)
    return scaled.view(len(scaled), -1, GROUP)


def take_group(groups: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """One group of each row: ``[rows, GROUP]`` for an index int64 ``[rows]``."""
    return groups.gather(1, index[:, None, None].expand(-1, 1, GROUP))[:, 0]


def group_starts(first: int, end: int, device: torch.device) -> torch.Tensor:
    """The first id of every group of the ids ``first..end``, int64 ``[groups]``."""
    return torch.arange(first, end, GROUP, device=device)


def group_noise(keys: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Gumbel noise ``[rows, groups]`` of the groups that begin at ``starts`` (int64 ``[groups]``).

    A group is known by its first id, so that no two share their noise, wherever a shard begins.
    """
    return gumbel(keys, FIRST_GROUP_INDEX + starts)


def draw_in_group(
    group: torch.Tensor, first: torch.Tensor, keys: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """An id of each row's group, and its scaled logit; ``first`` is the groups' first id."""
    ids = first[:, None] + torch.arange(GROUP, device=group.device)  # [rows, GROUP]
    at = (group + gumbel(keys, ids)).argmax(-1)
    return first + at, group.gather(1, at[:, None])[:, 0]
