"""Row statistics: what a decoding algorithm needs to know of one row of logits.

This is the reference in plain PyTorch. A row is one canvas position; everything
is computed in float32, whatever the dtype of the logits.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TypeVar

import torch

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
        """The statistics of some slots, int64 ``[n]``."""
        return type(self)(*(getattr(self, f.name)[index] for f in fields(self)))

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


def greedy_part(found: SampledStatistics, entropy: bool) -> RowStatistics:
    """The fields that an algorithm for masks reads, with the entropy if it asks for it."""
    if entropy:
        return EntropyStatistics(found.token, found.probability, found.entropy)
    return RowStatistics(found.token, found.probability)


def row_statistics(logits: torch.Tensor, forbidden: int, entropy: bool = False) -> RowStatistics:
    """Argmax and its probability for each row of ``logits``.

    The forbidden token (the mask) takes part in the normalisation, so that probabilities
    are those of the model, but it is never the argmax: a mask must not be written
    where a mask was read. Ties go to the lowest token id.

    Args:
        logits: ``[rows, vocabulary]``, any floating dtype. A vocabulary of at least two, one of
            them with a finite logit beside the forbidden one: else there is nothing to choose.
        forbidden: token id that is never chosen.
        entropy: also compute entropies (`EntropyStatistics`).

    Returns:
        Statistics of shape ``[rows]``.
    """
    probability = logits.softmax(dim=-1, dtype=torch.float32)  # [rows, vocabulary]
    # Probabilities underflow to equal zeros where logits still differ, so the choice is made
    # among logits; their one forbidden column is put back for the caller.
    column = logits[:, forbidden].clone()
    logits[:, forbidden] = -torch.inf
    token = logits.argmax(dim=-1)  # [rows]
    logits[:, forbidden] = column
    return _of_choice(token, probability, entropy)


def pure_row_statistics(
    logits: torch.Tensor, forbidden: int, entropy: bool = False
) -> RowStatistics:
    """`row_statistics` without a write: for a compiler, which makes no copy of the rows either.

    Operators would copy them to leave the forbidden token out, and a compiler the rows it writes.
    """
    probability = logits.softmax(dim=-1, dtype=torch.float32)
    allowed = torch.arange(logits.shape[1], device=logits.device) != forbidden
    token = torch.where(allowed, logits, -torch.inf).argmax(-1)
    return _of_choice(token, probability, entropy)


def _of_choice(token: torch.Tensor, probability: torch.Tensor, entropy: bool) -> RowStatistics:
    """Of the chosen tokens, int64 ``[rows]``, and all probabilities ``[rows, vocabulary]``."""
    top = probability.gather(1, token[:, None])[:, 0]
    if not entropy:
        return RowStatistics(token, top)
    return EntropyStatistics(token, top, -torch.xlogy(probability, probability).sum(-1))


def with_samples(
    greedy: RowStatistics, scaled: torch.Tensor, temperature: torch.Tensor, drawn: torch.Tensor
) -> RowStatistics:
    """Drawn tokens in place of the most likely ones, with a confidence for thresholds.

    A drawn token's confidence is the smaller of the argmax' probability and its own weight
    relative to the argmax, ``exp((logit - largest) / temperature)``. So a token that is
    as likely as the argmax is as sure, and sampling does not collapse into one token a step,
    as it would with the (small) probability of the drawn token itself.

    Args:
        greedy: statistics of shape ``[rows]``.
        scaled: ``[rows, vocabulary]``, logits divided by the temperature (by 1 where that is 0).
        temperature: float32 ``[rows]``; rows at 0 stay as they are.
        drawn: int64 ``[rows]``.
    """
    weight = (scaled.gather(1, drawn[:, None]) - scaled.gather(1, greedy.token[:, None])).exp()
    return with_drawn(greedy, weight[:, 0].float(), temperature > 0, drawn)


def with_drawn(
    greedy: RowStatistics, weight: torch.Tensor, sampled: torch.Tensor, drawn: torch.Tensor
) -> RowStatistics:
    """The same, given the drawn tokens' weights relative to the argmax, float32 ``[rows]``."""
    sure = torch.minimum(greedy.probability, weight)
    return replace(
        greedy,
        token=torch.where(sampled, drawn, greedy.token),
        probability=torch.where(sampled, sure, greedy.probability),
    )
