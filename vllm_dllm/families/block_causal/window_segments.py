"""The attention metadata of steps that read several blocks, for full CUDA graphs."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata

from vllm_dllm.attention.metadata import AttentionBatch


class WindowSegments:
    """The segments of each window of `blocks` blocks, in tensors that full CUDA graphs replay.

    A padding row has no tokens, and neither do its segments.
    """

    def __init__(self, block_length: int, rows: int, device: torch.device, blocks: int = 2) -> None:
        self.block_length = block_length
        self.blocks = blocks
        self.query_start = torch.zeros(blocks * rows + 1, dtype=torch.int32, device=device)
        self.seq_lens = torch.zeros(blocks * rows, dtype=torch.int32, device=device)
        # How many of its window's keys each segment does not see.
        hidden = [block_length * n for n in reversed(range(blocks))]
        self.hidden = torch.tensor(hidden, dtype=torch.int32, device=device)
        # One for each KV cache group; their width is known once vLLM has allocated its own.
        self.block_tables: list[torch.Tensor] = []

    def metadata(self, batch: AttentionBatch) -> dict[str, Any]:
        """Return attention metadata for a batch in which every request has a window."""
        given, rows = batch.input, batch.rows
        blocks, length = self.blocks, self.block_length
        count = blocks * rows
        starts = torch.from_numpy(given.query_start_loc_np[: rows + 1])
        query_start = self.query_start[: count + 1]
        query_start.copy_(cut(given.query_start_loc[: rows + 1], length, blocks))
        seen = given.seq_lens[:rows]
        self.seq_lens[:count] = (seen[:, None] - self.hidden).flatten().clamp_min(0)
        widths = [table.shape[1] for table in batch.block_tables]
        # They are narrower when vLLM has fitted the context length into memory.
        if widths != [table.shape[1] for table in self.block_tables]:
            self.block_tables = [
                table.new_zeros(len(self.seq_lens), table.shape[1]) for table in batch.block_tables
            ]
        for own, table in zip(self.block_tables, batch.block_tables, strict=True):
            own[:count].view(rows, blocks, -1).copy_(table[:rows, None].expand(-1, blocks, -1))
        return build_attn_metadata(
            num_reqs=count,
            query_start_loc_gpu=query_start,
            query_start_loc_cpu=cut(starts, length, blocks),
            max_query_len=length,
            seq_lens=self.seq_lens[:count],
            seq_lens_cpu_upper_bound=given.seq_lens_cpu_upper_bound[:rows].repeat_interleave(
                blocks
            ),
            block_tables=tuple(table[:count] for table in self.block_tables),
            causal=False,
            **batch.common,
        )


def cut(query_start: torch.Tensor, length: int, blocks: int) -> torch.Tensor:
    """Starts of the parts of `length` tokens, ``[blocks * rows + 1]``, given ``[rows + 1]``."""
    start, end = query_start[:-1, None], query_start[1:, None]
    offset = torch.arange(0, blocks * length, length, device=start.device, dtype=start.dtype)
    return torch.cat([torch.minimum(start + offset, end).flatten(), query_start[-1:]])
