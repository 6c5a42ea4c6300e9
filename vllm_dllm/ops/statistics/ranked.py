"""The likeliest tokens of a row of logits, in order; for algorithms that may take the next best."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RankedTokens:
    """The K likeliest tokens of a set of rows, without the forbidden one.

    Attributes:
        tokens: int64 ``[..., K]``, the likeliest first.
        probability: float32 ``[..., K]``, their probabilities where the forbidden token has none.
    """

    tokens: torch.Tensor
    probability: torch.Tensor

    @classmethod
    def join(cls, parts: list[RankedTokens]) -> RankedTokens:
        """Concatenate the rows of several parts."""
        return cls(
            torch.cat([part.tokens for part in parts]),
            torch.cat([part.probability for part in parts]),
        )

    def view(self, *shape: int) -> RankedTokens:
        """The same tokens with rows in another shape, e.g. ``[slots, L]``."""
        return RankedTokens(self.tokens.view(*shape, -1), self.probability.view(*shape, -1))

    def take(self, index: torch.Tensor) -> RankedTokens:
        """The tokens of the rows or slots in ``index``, int64 ``[n]``."""
        return RankedTokens(
            self.tokens.index_select(0, index), self.probability.index_select(0, index)
        )


def ranked_tokens(logits: torch.Tensor, forbidden: int, count: int) -> RankedTokens:
    """The `count` likeliest tokens of each row; ties go to the lowest token id.

    `torch.topk` breaks ties in any order, and logits in bfloat16 are often equal. So the largest is
    found and excluded again and again.

    Args:
        logits: ``[rows, vocabulary]``, any floating dtype; overwritten.
        forbidden: token id that is never chosen, and takes no part in the normalisation.
        count: at least 1.
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
