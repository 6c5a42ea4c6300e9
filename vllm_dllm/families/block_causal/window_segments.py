"""The attention metadata of steps that read two blocks, for full CUDA graphs."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata

from vllm_dllm.attention.metadata import AttentionBatch


class WindowSegments:
    """The two segments of each window of two blocks, in tensors that full CUDA graphs replay.

    A padding row has no tokens, and neither do its two segments.
    """

    def __init__(self, block_length: int, rows: int, device: torch.device) -> None:
        self.block_length = block_length
        self.query_start = torch.zeros(2 * rows + 1, dtype=torch.int32, device=device)
        self.seq_lens = torch.zeros(2 * rows, dtype=torch.int32, device=device)
        # One for each KV cache group; their width is known once vLLM has allocated its own.
        self.block_tables: list[torch.Tensor] = []

    def metadata(self, batch: AttentionBatch) -> dict[str, Any]:
        """Return attention metadata for a batch in which every request has a window."""
        given, rows = batch.input, batch.rows
        count, length = 2 * rows, self.block_length
        starts = torch.from_numpy(given.query_start_loc_np[: rows + 1])
        query_start = self.query_start[: count + 1]
        query_start.copy_(halved(given.query_start_loc[: rows + 1], length))
        seen = given.seq_lens[:rows]
        self.seq_lens[:count] = torch.stack([seen - length, seen], 1).flatten().clamp_min(0)
        if not self.block_tables:
            self.block_tables = [
                table.new_zeros(len(self.seq_lens), table.shape[1]) for table in batch.block_tables
            ]
        for own, table in zip(self.block_tables, batch.block_tables, strict=True):
            own[:count].view(rows, 2, -1).copy_(table[:rows, None].expand(-1, 2, -1))
        return build_attn_metadata(
            num_reqs=count,
            query_start_loc_gpu=query_start,
            query_start_loc_cpu=halved(starts, length),
            max_query_len=length,
            seq_lens=self.seq_lens[:count],
            seq_lens_cpu_upper_bound=given.seq_lens_cpu_upper_bound[:rows].repeat_interleave(2),
            block_tables=tuple(table[:count] for table in self.block_tables),
            causal=False,
            **batch.common,
        )


def halved(query_start: torch.Tensor, length: int) -> torch.Tensor:
    """Starts ``[2 rows + 1]`` of the halves of `length` tokens, given starts ``[rows + 1]``."""
    start, end = query_start[:-1], query_start[1:]
    halves = torch.stack([start, torch.minimum(start + length, end)], 1).flatten()
    return torch.cat([halves, query_start[-1:]])
