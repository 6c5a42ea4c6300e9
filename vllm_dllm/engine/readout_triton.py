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
