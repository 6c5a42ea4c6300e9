"""Row statistics by this package's Triton kernels (``dllm.kernels=triton``)."""

from __future__ import annotations

import torch

from vllm_dllm.ops.statistics.head import Head
from vllm_dllm.ops.statistics.rows import RowStatistics
from vllm_dllm.ops.statistics.rows_triton import head_statistics, logits_statistics


class MaskedKernels:
    """Statistics of a masked model: one pass over logits, or over the head without logits."""

    def __init__(self, head: Head) -> None:
        self.head = head

    def from_hidden(self, hidden: torch.Tensor, forbidden: int, entropy: bool) -> RowStatistics:
        """The statistics of `row_statistics` from hidden states ``[rows, hidden]``."""
        partials = head_statistics(hidden, self.head, forbidden=forbidden)
        return partials.merge_ranks(self.head.shard).greedy_statistics(entropy)

    @staticmethod
    def from_logits(logits: torch.Tensor, forbidden: int, entropy: bool) -> RowStatistics:
        """The statistics of `row_statistics` from logits ``[rows, vocabulary]``."""
        return logits_statistics(logits, forbidden).greedy_statistics(entropy)

    @staticmethod
    def drawn(
        logits: torch.Tensor, temperature: torch.Tensor | None, keys: torch.Tensor, forbidden: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A token drawn from each row, and its weight relative to the likeliest token.

        Args:
            logits: ``[rows, vocabulary]``; -inf excludes a token, but never the likeliest.
            temperature: float32 ``[rows]``, by which logits are divided where it is not 0; None for
                1 in all rows.
            keys: int64 ``[rows]``, see `noise.keyed.row_keys`.
            forbidden: id that is never drawn.

        Returns:
            Ids, int64 ``[rows]``, and weights, float32 ``[rows]``, see `sampled.drawn_weight`.
        """
        found = logits_statistics(logits, forbidden, temperature, keys)
        return found.sample, (found.scaled - found.best).exp()
