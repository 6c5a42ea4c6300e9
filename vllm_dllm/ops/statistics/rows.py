"""Row statistics: what a decoding algorithm needs to know about one row of logits.

This is the reference in plain PyTorch. A row belongs to one canvas position. Everything
is computed in float32, whatever the dtype of the logits.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TypeVar

import torch

from vllm_dllm.ops.statistics.groups import FAR, GROUP, grouped, take_group

Statistics = TypeVar("Statistics", bound="RowStatistics")


@dataclass
class RowStatistics:
    """Greedy statistics of a set of logits rows; every field has the shape of the rows.

    Not frozen: constraints overwrite the tensors in place.

    Attributes:
        token: int64, the most likely token that may be produced.
        probability: float32, its softmax probability over the *whole* vocabulary.
    """

    token: torch.Tensor
    probability: torch.Tensor

    def view(self: Statistics, *shape: int) -> Statistics:
        """The same statistics in another shape, e.g. ``[slots, L]``."""
        return type(self)(*(getattr(self, f.name).view(*shape) for f in fields(self)))

    def take(self: Statistics, index: torch.Tensor) -> Statistics:
        """The statistics of the rows or slots in ``index``, int64 ``[n]``."""
        return type(self)(*(getattr(self, f.name)[index] for f in fields(self)))

    def spread(self: Statistics, index: torch.Tensor, rows: int) -> Statistics:
        """These statistics as those of the rows in ``index`` (int64 ``[n]``) of `rows`.

        The others are 0.
        """
        parts = (getattr(self, f.name) for f in fields(self))
        return type(self)(*(part.new_zeros(rows).index_copy_(0, index, part) for part in parts))

    @classmethod
    def join(cls: type[Statistics], parts: list[Statistics]) -> Statistics:
        """Concatenate the rows of several parts."""
        if len(parts) == 1:
            return parts[0]
        return cls(*(torch.cat([getattr(p, f.name) for p in parts]) for f in fields(cls)))


@dataclass
class EntropyStatistics(RowStatistics):
    """Row statistics with ``entropy``, float32, nats, of the whole distribution."""

    entropy: torch.Tensor


@dataclass
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


def row_statistics(logits: torch.Tensor, forbidden: int, entropy: bool = False) -> RowStatistics:
    """Argmax and its probability for each row of ``logits``.

    The forbidden token (the mask) takes part in the normalisation, so probabilities are those of
    the model, but it is never the argmax: a mask must not be written where a mask was read. Ties go
    to the lowest token id.

    Args:
        logits: ``[rows, vocabulary]``, any floating dtype. In each row a token other than the
            forbidden one must have a finite logit.
        forbidden: token id that is never chosen.
        entropy: also compute entropies (`EntropyStatistics`).

    Returns:
        Statistics of shape ``[rows]``.
    """
    probability = logits.softmax(dim=-1, dtype=torch.float32)  # [rows, vocabulary]
    # Tokens are compared by their logits, because different logits may underflow to the same
    # probability 0. The forbidden column is restored for the caller.
    column = logits[:, forbidden].clone()
    logits[:, forbidden] = -torch.inf
    token = logits.argmax(dim=-1)  # [rows]
    logits[:, forbidden] = column
    top = probability.gather(1, token[:, None])[:, 0]
    if not entropy:
        return RowStatistics(token, top)
    return EntropyStatistics(token, top, -torch.xlogy(probability, probability).sum(-1))


def grouped_statistics(logits: torch.Tensor, forbidden: int) -> EntropyStatistics:
    """`row_statistics` as a function to be compiled: without side effects, and by groups of ids.

    Compiled, it makes no copy of the logits, and a CPU takes a sixth of the time; run as operators,
    it would copy them several times.
    """
    logits = logits.float()
    groups = grouped(logits)  # [rows, groups, GROUP]
    best = groups.amax(-1)
    largest = best.amax(-1, keepdim=True)
    inside = torch.arange(GROUP, device=logits.device)
    group, place = forbidden // GROUP, forbidden % GROUP
    allowed = groups[:, group].masked_fill(inside == place, -torch.inf).amax(-1, keepdim=True)
    is_group = torch.arange(groups.shape[1], device=logits.device) == group
    chosen = torch.where(is_group, allowed, best).argmax(-1, keepdim=True)  # [rows, 1]
    ids = chosen * GROUP + inside
    choice = take_group(groups, chosen[:, 0]).masked_fill(ids == forbidden, -torch.inf)
    index = choice.argmax(-1, keepdim=True)
    distance = (logits - largest).clamp_min(FAR)
    weight = distance.exp()
    total = weight.sum(-1)
    top = (choice.gather(1, index) - largest)[:, 0].exp() / total
    token = (chosen * GROUP + index)[:, 0]
    return EntropyStatistics(token, top, total.log() - (distance * weight).sum(-1) / total)
