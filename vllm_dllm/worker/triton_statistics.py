"""Row statistics by this package's Triton kernels (``dllm.kernels=triton``)."""

from __future__ import annotations

import torch

from vllm_dllm.ops.statistics.head import Head
from vllm_dllm.ops.statistics.head_triton import head_statistics
from vllm_dllm.ops.statistics.launch_triton import measured
from vllm_dllm.ops.statistics.rows import RowStatistics
from vllm_dllm.ops.statistics.rows_triton import measured_statistics
from vllm_dllm.ops.statistics.sampled import wanted_of
from vllm_dllm.worker.masked_kernels import OfLogits, RowFunctions


class TritonKernels(OfLogits):
    """Of a masked model: one pass over logits, or over the head without any."""

    def __init__(self, functions: RowFunctions, head: Head) -> None:
        super().__init__(functions)
        if head.weight is None:
            raise ValueError("this head has no weight for kernels to read")
        self.tiles = head
        # Probabilities are the model's own, at temperature 1: no row counts as greedy.
        self.greedy = torch.zeros((), dtype=torch.bool, device=head.weight.device)

    def rows(self, logits: torch.Tensor, forbidden: int, entropy: bool) -> RowStatistics:
        """See `MaskedKernels`."""
        return wanted_of(measured_statistics(logits, forbidden=forbidden), entropy)

    def head(self, hidden: torch.Tensor, forbidden: int, entropy: bool) -> RowStatistics:
        """See `MaskedKernels`."""
        found = head_statistics(hidden, self.tiles, forbidden=forbidden)
        if self.tiles.shard is not None:
            found = found.met(self.tiles.shard)
        return wanted_of(measured(found, self.greedy), entropy)
