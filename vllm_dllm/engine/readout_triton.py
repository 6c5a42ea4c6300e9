"""Readouts that use this package's Triton kernels (``dllm.kernels=triton``)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from vllm_dllm.engine.readout_dense import TilesReadout
from vllm_dllm.engine.readout_tiled import TiledReadout
from vllm_dllm.engine.slots import SlotState
from vllm_dllm.ops.statistics.head import Head
from vllm_dllm.ops.statistics.head_triton import head_statistics
from vllm_dllm.ops.statistics.launch_triton import measured
from vllm_dllm.ops.statistics.rows import RowStatistics, greedy_part
from vllm_dllm.ops.statistics.rows_triton import measured_statistics
from vllm_dllm.ops.statistics.soft_embedding_triton import fused_statistics
from vllm_dllm.ops.statistics.tiled import Result

if TYPE_CHECKING:
    from vllm_dllm.engine.optional_parts import OptionalParts


class TritonDenseReadout(TilesReadout):
    """See `Readout`; for a masked model.

    Statistics take one pass, either over logits or over the head without computing logits.
    """

    def __init__(
        self,
        head: Callable[[torch.Tensor], torch.Tensor],
        tiles: Head,
        slots: SlotState,
        parts: OptionalParts,
        compile: bool = False,
    ) -> None:
        super().__init__(head, tiles, slots, parts, compile)
        if tiles.weight is None:
            raise ValueError("this head has no weight for kernels to read")
        # Probabilities are the model's own, at temperature 1: no row counts as greedy.
        self.greedy = torch.zeros((), dtype=torch.bool, device=tiles.weight.device)

    def _statistics_of_rows(self) -> Callable[[torch.Tensor, int, bool], RowStatistics]:
        return rows_by_kernel

    def _likeliest(self, hidden: torch.Tensor, entropy: bool) -> RowStatistics:
        """Statistics ``[rows]`` of the likeliest tokens."""
        partials = head_statistics(hidden, self.tiles, forbidden=self.mask_token)
        if self.tiles.shard is not None:
            partials = partials.merge_ranks(self.tiles.shard)
        return greedy_part(measured(partials, self.greedy), entropy)


def rows_by_kernel(logits: torch.Tensor, forbidden: int, entropy: bool) -> RowStatistics:
    """Compute `row_statistics` with a Triton kernel."""
    return greedy_part(measured_statistics(logits, forbidden=forbidden), entropy)


class TritonTiledReadout(TiledReadout):
    """See `Readout`; for a model of uniform noise."""

    def __init__(
        self, head: Head, slots: SlotState, parts: OptionalParts, compile: bool = False
    ) -> None:
        super().__init__(head, slots, parts, compile)
        self.statistics = partial(tiles_by_kernel, compile=compile)


def tiles_by_kernel(
    hidden: torch.Tensor,
    head: Head,
    temperature: torch.Tensor,
    keys: torch.Tensor,
    budget: int,
    compile: bool = False,
) -> Result:
    """Compute `tiled_statistics` with Triton kernels."""
    statistics, soft = fused_statistics(hidden, head, temperature, keys.flatten(), budget, compile)
    return statistics.view(*keys.shape), soft
