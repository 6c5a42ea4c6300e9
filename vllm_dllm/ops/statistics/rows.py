"""Row statistics: what a decoding algorithm needs to know about one row of logits.

This is the reference in plain PyTorch. A row belongs to one canvas position. Everything is computed
in float32, whatever the dtype of the logits.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TypeVar

import torch

# Torch functions read rows of logits in groups of so many consecutive ids. The maximum of a group
# takes a CPU a tenth of the time of an argmax over the row; then an argmax over the groups and one
# inside the best group are enough. Draws have the same two stages.
GROUP = 64
# Weights below exp(FAR) are raised to it. It is negligible against a row's sum (at least 1), and
# still a normal float32: denormal numbers make a CPU many times slower.
FAR = -87.0

Record = TypeVar("Record", bound="OfRows")
Statistics = TypeVar("Statistics", bound="RowStatistics")


@dataclass
class OfRows:
    """A record of tensors that all begin with the dimension of the rows, or of the slots."""

    def take(self: Record, index: torch.Tensor) -> Record:
        """What belongs to the rows in ``index``, int64 ``[n]``."""
        return type(self)(*(getattr(self, f.name).index_select(0, index) for f in fields(self)))

    @classmethod
    def join(cls: type[Record], parts: list[Record]) -> Record:
        """Concatenate the rows of several parts."""
        if len(parts) == 1:
            return parts[0]
        return cls(*(torch.cat([getattr(p, f.name) for p in parts]) for f in fields(cls)))


@dataclass
class RowStatistics(OfRows):
    """Greedy statistics of a set of logits rows; every field has the shape of the rows.

    Not frozen: constraints overwrite the tensors in place.
    """

    token: torch.Tensor  # int64, the most likely token that may be produced
    probability: torch.Tensor  # float32, its softmax probability over the *whole* vocabulary

    def view(self: Statistics, *shape: int) -> Statistics:
        """The same statistics in another shape, e.g. ``[slots, L]``."""
        return type(self)(*(getattr(self, f.name).view(*shape) for f in fields(self)))

    def spread(self: Statistics, index: torch.Tensor, rows: int) -> Statistics:
        """These statistics as those of the rows in ``index`` (int64 ``[n]``) of `rows`.

        The others are 0.
        """
        parts = (getattr(self, f.name) for f in fields(self))
        return type(self)(*(part.new_zeros(rows).index_copy_(0, index, part) for part in parts))


@dataclass
class EntropyStatistics(RowStatistics):
    """Row statistics with ``entropy``, float32, nats, of the whole distribution."""

    entropy: torch.Tensor


@dataclass
class SampledStatistics(RowStatistics):
    """Row statistics of the tempered distribution; every field has the shape of the rows.

    `token` and `probability` are the argmax and its probability at the row's temperature. At
    temperature 0 the distribution is the argmax alone: the sample is the argmax, its probability
    1 and the entropy 0.
    """

    sample: torch.Tensor  # int64, a Gumbel-max draw
    sample_probability: torch.Tensor  # float32, its probability
    entropy: torch.Tensor  # float32, nats


def row_statistics(logits: torch.Tensor, forbidden: int, entropy: bool = False) -> RowStatistics:
    """Statistics ``[rows]`` of logits; with `entropy`, `EntropyStatistics`.

    The forbidden token (the mask) takes part in the normalisation, so probabilities are those of
    the model, but it is never the argmax: a mask must not be written where a mask was read. Ties go
    to the lowest token id.

    The logits are ``[rows, vocabulary]`` of any floating dtype. In each row a token other than the
    forbidden one must have a finite logit.
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


@dataclass
class RankedTokens(OfRows):
    """The K likeliest tokens of a set of rows, without the forbidden one."""

    tokens: torch.Tensor  # int64 [..., K], the likeliest first
    # float32 [..., K], their probabilities where the forbidden token has none.
    probability: torch.Tensor

    def view(self, *shape: int) -> RankedTokens:
        """The same tokens with rows in another shape, e.g. ``[slots, L]``."""
        return RankedTokens(self.tokens.view(*shape, -1), self.probability.view(*shape, -1))


def ranked_tokens(logits: torch.Tensor, forbidden: int, count: int) -> RankedTokens:
    """The `count` likeliest tokens of each row, at least 1; ties go to the lowest token id.

    The logits ``[rows, vocabulary]`` of any floating dtype are overwritten. The forbidden token is
    never chosen, and takes no part in the normalisation. `torch.topk` breaks ties in any order, and
    logits in bfloat16 are often equal. So the largest is found and excluded again and again.
    """
    logits[:, forbidden] = -torch.inf
    total = logits.float().logsumexp(-1, keepdim=True)
    tokens, values = [], []
    for _ in range(count):
        best = logits.argmax(-1, keepdim=True)  # [rows, 1]
        tokens.append(best)
        values.append(logits.gather(1, best).float())
        logits.scatter_(1, best, -torch.inf)
    return RankedTokens(torch.cat(tokens, 1), (torch.cat(values, 1) - total).exp())


def grouped(scaled: torch.Tensor) -> torch.Tensor:
    """``[rows, ids]`` as ``[rows, groups, GROUP]``, with the last group padded with -inf."""
    missing = -scaled.shape[1] % GROUP
    if missing:
        scaled = torch.nn.functional.pad(scaled, (0, missing), value=-torch.inf)
    return scaled.view(len(scaled), scaled.shape[1] // GROUP, GROUP)


def group_starts(first: int, end: int, device: torch.device) -> torch.Tensor:
    """The first id of every group of the ids ``first..end``, int64 ``[groups]``."""
    return torch.arange(first, end, GROUP, device=device)


def take_group(groups: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """One group of each row: ``[rows, GROUP]`` for an index int64 ``[rows]``."""
    return groups.gather(1, index[:, None, None].expand(-1, 1, GROUP))[:, 0]
