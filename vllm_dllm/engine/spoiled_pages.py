"""Cleans KV pages into which a request has written NaN or infinities, once it has ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

# How many pages of a layer are copied at a time, to check them.
AT_ONCE = 64
# vLLM stores float8 as bytes. The least that is not finite without its sign, by the cache's dtype.
NOT_FINITE = {"fp8": 0x7F, "fp8_e4m3": 0x7F, "fp8_e5m2": 0x7C}


class Pages:
    """The KV pages of the slots.

    An attention kernel may multiply unwritten positions of a page by a weight of zero, and zero
    times NaN is NaN: one spoiled page would spoil every request that later uses it.
    """

    def __init__(self, block_tables: Any, groups: Sequence[Any], layers: Mapping[str, Any]) -> None:
        """Know vLLM's ``BlockTables``, KV cache groups, and attention layers by name."""
        self.block_tables = block_tables
        self.groups = [[layers[name] for name in group.layer_names] for group in groups]

    def ids(self, slot: int, group: int) -> torch.Tensor:
        """Ids of the slot's pages in a KV cache group, int64 ``[n]``."""
        count = int(self.block_tables.num_blocks.np[group, slot])
        return self.block_tables.block_tables[group].gpu[slot, :count].long()

    def scrub(self, slot: int) -> None:
        """Replace NaN and infinities in the slot's pages with zeros.

        Finite numbers are kept, because other requests may share the pages.
        """
        for group, layers in enumerate(self.groups):
            for ids in self.ids(slot, group).split(AT_ONCE):
                for layer in layers:
                    content = layer.kv_cache[ids]
                    least = NOT_FINITE.get(layer.kv_cache_dtype)
                    if least is None:
                        content.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
                    else:
                        content.masked_fill_(content & 0x7F >= least, 0)
                    layer.kv_cache[ids] = content
