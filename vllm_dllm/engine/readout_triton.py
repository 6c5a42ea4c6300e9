"""Row statistics by this package's Triton kernels (``dllm.kernels=triton``)."""

from __future__ import annotations

import torch

from vllm_dllm.ops.statistics.head import Head
from vllm_dllm.ops.statistics.head_triton import head_statistics
from vllm_dllm.ops.statistics.launch_triton import measured
from vllm_dllm.ops.statistics.rows import RowStatistics, greedy_part
from vllm_dllm.ops.statistics.rows_triton import measured_statistics
from vllm_dllm.ops.statistics.soft_embedding_triton import fused_statistics
from vllm_dllm.ops.statistics.tiled import Result


class MaskedKernels:
    """Statistics of a masked model: one pass over logits, or over the head without logits."""

    def __init__(self, head: Head) -> None:
        if head.weight is None:
            raise ValueError("this head has no weight for kernels to read")
        self.head = head
        # Probabilities are the model's own, at temperature 1: no row counts as greedy.
        self.greedy = torch.zeros((), dtype=torch.bool, device=head.weight.device)

    def from_hidden(self, hidden: torch.Tensor, forbidden: int, entropy: bool) -> RowStatistics:
        """The statistics of `row_statistics` from hidden states ``[rows, hidden]``."""
        partials = head_statistics(hidden, self.head, forbidden=forbidden)
        if self.head.shard is not None:
            partials = partials.merge_ranks(self.head.shard)
        return greedy_part(measured(partials, self.greedy), entropy)

    @staticmethod
    def from_logits(logits: torch.Tensor, forbidden: int, entropy: bool) -> RowStatistics:
        """The statistics of `row_statistics` from logits ``[rows, vocabulary]``."""
        return greedy_part(measured_statistics(logits, forbidden=forbidden), entropy)


def statistics_by_kernels(
    hidden: torch.Tensor,
    head: Head,
    temperature: torch.Tensor,
    keys: torch.Tensor,
    budget: int,
    compile: bool = False,
) -> Result:
    """The same as `tiled_statistics`, for a model of uniform noise."""
    statistics, soft = fused_statistics(hidden, head, temperature, keys.flatten(), budget, compile)
    return statistics.view(*keys.shape), soft
