"""Row statistics with a sample, from whole rows of logits: the plain reference.

`tiled` computes the same without ever holding a whole row.
"""

from __future__ import annotations

import torch

from vllm_dllm.ops.statistics.log_sums import logsumexp
from vllm_dllm.ops.statistics.partials import (
    FIRST_GROUP_INDEX,
    GROUP,
    draw_in_group,
    group_noise,
    grouped,
    take_group,
)
from vllm_dllm.ops.statistics.rows import SampledStatistics

__all__ = [
    "FIRST_GROUP_INDEX",
    "GROUP",
    "SampledStatistics",
    "draw",
    "draw_and_sum",
    "draw_in_group",
    "group_noise",
    "group_starts",
    "grouped",
    "sampled_statistics",
    "take_group",
]


def sampled_statistics(
    logits: torch.Tensor, temperature: torch.Tensor, keys: torch.Tensor
) -> tuple[SampledStatistics, torch.Tensor]:
    """Statistics and probabilities of the tempered distribution, from whole rows of logits.

    Args:
        logits: ``[rows, vocabulary]``; -inf excludes a token, but not all tokens of a row.
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
    """Draw ids from ``softmax(scaled)``, in the two stages that `partials` describes.

    Args:
        scaled: float32 ``[rows, vocabulary]``, logits divided by the temperature.
        keys: int64 ``[rows]``, see `noise.row_keys`.

    Returns:
        Ids, int64 ``[rows]``.
    """
    return _draw(scaled, keys)[0]


def draw_and_sum(scaled: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`draw`, and the log-sum-exp of each row, float32 ``[rows]``; both read the rows once."""
    token, by_group = _draw(scaled, keys)
    return token, logsumexp(by_group)


def _draw(scaled: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The drawn ids, and the log-sum-exp of each group, float32 ``[rows, groups]``."""
    groups = grouped(scaled)
    by_group = logsumexp(groups)
    score = by_group + group_noise(keys, group_starts(0, scaled.shape[1], keys.device))
    chosen = score.argmax(-1)
    token = draw_in_group(take_group(groups, chosen), chosen * GROUP, keys)[0]
    return token, by_group


def group_starts(first: int, end: int, device: torch.device) -> torch.Tensor:
    """The first id of every group of the ids ``first..end``, int64 ``[groups]``."""
    return torch.arange(first, end, GROUP, device=device)
