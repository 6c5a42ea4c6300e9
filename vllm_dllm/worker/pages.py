"""KV pages that a request spoiled with NaN or infinities.

An attention kernel may multiply a page's unwritten slots with a weight of zero, and zero times NaN
is NaN: one spoiled page would spoil every request that gets it later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


class Pages:
    """The pages of the slots.

    Args:
        block_tables: vLLM's ``BlockTables``, which know each slot's pages in each KV cache group.
        groups: the groups, with the names of their layers.
        layers: vLLM's attention layers by name, each with its ``kv_cache`` ``[pages, ...]``.
    """

    def __init__(self, block_tables: Any, groups: Sequence[Any], layers: Mapping[str, Any]) -> None:
        self.block_tables = block_tables
        self.groups = [[layers[name] for name in group.layer_names] for group in groups]

    def of(self, slot: int, group: int) -> torch.Tensor:
        """Ids of the slot's pages in a group, int64 ``[n]``."""
        count = int(self.block_tables.num_blocks.np[group, slot])
        return self.block_tables.block_tables[group].gpu[slot, :count].long()

    def scrub(self, slot: int) -> None:
        """Zeros where the slot's pages hold no number. What is a number stays: pages are shared."""
        for group, layers in enumerate(self.groups):
            ids = self.of(slot, group)
            for layer in layers:
                held = layer.kv_cache[ids]
                # By float32, which has all values of float8, where this operator is missing.
                clean = held.float().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
                layer.kv_cache[ids] = clean.to(held.dtype)
