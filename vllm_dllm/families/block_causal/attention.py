"""LLaDA2's attention: a position sees its whole block and everything before the block.

A prefill chunk is one segment for each of its blocks; each segment is non-causal and ends where its
block ends. Segments are handed to vLLM's attention backend as if they were separate requests
(*virtual sequences*). This is exact, because the keys and values of the whole batch are written
before any of them is read, and it requires only non-causal attention of the backend.

This package's own backend takes the block length directly and needs no segments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata

from vllm_dllm.attention.metadata import AttentionBatch
from vllm_dllm.engine.slots import SlotState
from vllm_dllm.engine.to_device import to_device

if TYPE_CHECKING:
    from vllm_dllm.attention.backend import MaskRules


class BlockCausal:
    """An `AttentionRule`: a canvas is one non-causal query, and a prefill chunk is one per block.

    The number of segments depends on the batch, so a full CUDA graph replays only batches whose
    queries lie inside one block each, or are windows of two blocks.

    Attributes:
        block_length: L.
        device: what attention runs on.
        windows: the segments of windows, where steps read two blocks.
    """

    graph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, block_length: int, device: torch.device, windows: int = 0) -> None:
        """Set up for this block length, and steps with at most `windows` windows of two blocks."""
        self.block_length = block_length
        self.device = device
        self.windows = WindowSegments(block_length, windows, device) if windows else None

    def metadata(self, batch: AttentionBatch) -> dict[str, Any]:
        """See `AttentionRule`.

        Raises:
            RuntimeError: a full CUDA graph would replay a query longer than a block and give wrong
                answers.
        """
        given = batch.input
        query_lengths = given.num_scheduled_tokens
        if (query_lengths <= self.block_length).all():
            # Each query lies inside one block, so every request is already a segment.
            return batch.one_query_per_request(causal=False)
        # A capture must read the same tensors as the graph's replays.
        persists = batch.full or batch.common["for_cudagraph_capture"]
        are_windows = (query_lengths == 2 * self.block_length).all()
        if persists and are_windows and self.windows is not None:
            return self.windows.metadata(batch)
        if batch.full:
            raise RuntimeError(
                f"a full CUDA graph was chosen for a query of {query_lengths.max()} tokens, but "
                f"it can replay queries of one block ({self.block_length}) only; set "
                "cudagraph_mode to FULL_AND_PIECEWISE or FULL_DECODE_ONLY"
            )
        segments = split_into_blocks(query_lengths, self.block_length)
        row = to_device(segments.row, self.device)
        hidden_keys = to_device(segments.hidden_keys, self.device)
        bound = given.seq_lens_cpu_upper_bound[torch.from_numpy(segments.row)]
        return build_attn_metadata(
            num_reqs=len(segments),
            query_start_loc_gpu=to_device(segments.query_start, self.device),
            query_start_loc_cpu=torch.from_numpy(segments.query_start),
            max_query_len=segments.max_query_len,
            seq_lens=given.seq_lens[row] - hidden_keys,
            seq_lens_cpu_upper_bound=bound - torch.from_numpy(segments.hidden_keys),
            block_tables=tuple(table[row] for table in batch.block_tables),
            causal=False,
            **batch.common,
        )


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


def block_causal_rules(slots: SlotState) -> MaskRules:
    """The rules for this package's own backend: prompts and canvases share one rule."""
    from vllm_dllm.attention.backend import MaskRules

    rules = MaskRules(len(slots.phase), slots.device)
    rules.rule.block.fill_(slots.length)
    return rules


@dataclass(frozen=True)
class Segments:
    """Query segments of a batch, in query order. Arrays are int32.

    Attributes:
        row: ``[segments]``, the batch row that a segment belongs to.
        query_start: ``[segments + 1]``, a segment's first token, counted over the batch, and the
            number of tokens at the end.
        hidden_keys: ``[segments]``, how many of its row's newest keys a segment does not see.
        max_query_len: tokens of the longest segment.
    """

    row: np.ndarray
    query_start: np.ndarray
    hidden_keys: np.ndarray
    max_query_len: int

    def __len__(self) -> int:
        return len(self.row)


def split_into_blocks(query_lengths: np.ndarray, block_length: int) -> Segments:
    """Cut each row's query at multiples of the block length.

    Every prefill chunk and every canvas starts on a block boundary, so positions inside the query
    fall into the same blocks as positions inside the sequence.

    Args:
        query_lengths: int ``[rows]``, query tokens of each row, at least 1.
        block_length: L.
    """
    rows: np.ndarray = np.arange(len(query_lengths), dtype=np.int32)
    counts: np.ndarray = -(-query_lengths // block_length)
    row: np.ndarray = np.repeat(rows, counts)
    # The index of each segment within its row.
    nth = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    length_of_row = query_lengths[row]
    begin = nth * block_length
    end = np.minimum(begin + block_length, length_of_row)
    row_start = np.cumsum(query_lengths) - query_lengths
    query_start: np.ndarray = np.empty(len(row) + 1, dtype=np.int32)
    query_start[:-1] = row_start[row] + begin
    query_start[-1] = query_lengths.sum()
    return Segments(
        row=row,
        query_start=query_start,
        hidden_keys=(length_of_row - end).astype(np.int32),
        max_query_len=int((end - begin).max()),
    )
