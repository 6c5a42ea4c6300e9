"""Row statistics: what a decoding algorithm needs to know of one row of logits.

This is the reference in plain PyTorch. A row is one canvas position; everything
is computed in float32, whatever the dtype of the logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RowStatistics:
    """Greedy statistics of a set of logits rows; every field has the shape of the rows.

    Attributes:
        token: int64, the most likely token that may be produced.
        probability: float32, its softmax probability over the *whole* vocabulary.
    """

    token: torch.Tensor
    probability: torch.Tensor

    def view(self, *shape: int) -> RowStatistics:
        """The same statistics in another shape, e.g. ``[slots, L]``."""
        return RowStatistics(self.token.view(*shape), self.probability.view(*shape))


def row_statistics(logits: torch.Tensor, forbidden: int) -> RowStatistics:
    """Argmax and its probability for each row of ``logits``.

    The forbidden token (the mask) takes part in the normalisation, so that probabilities
    are those of the model, but it is never the argmax: a mask must not be written
    where a mask was read. Ties go to the lowest token id.

    Args:
        logits: ``[rows, vocabulary]``, any floating dtype. A vocabulary of at least two, one of
            them with a finite logit beside the forbidden one: else there is nothing to choose.
        forbidden: token id that is never chosen.

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
    return RowStatistics(token, probability.gather(1, token[:, None])[:, 0])
