"""LLaDA2's attention: a position sees its whole block and everything before the block.

A prefill chunk is one segment for each of its blocks; each segment is non-causal and ends where its
block ends. vLLM's attention backends get segments as if they were separate requests (*virtual
sequences*). This is exact, because the keys and values of the whole batch are written before any of
them is read. This package's own backend takes the block length directly and needs no segments.
"""

from __future__ import annotations

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
    from vllm_dllm.families.block_causal.window_segments import WindowSegments


class BlockCausal:
    """An `AttentionRule`: each block of a canvas or a prefill chunk is one non-causal query.

    The number of segments depends on the batch, so a full CUDA graph replays only batches whose
    queries lie inside one block each, or have as many blocks as a step reads.
    """

    graph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self, block_length: int, device: torch.device, rows: int = 0, blocks: int = 1
    ) -> None:
        """Set up for this block length, and steps of at most `rows` requests with `blocks` each."""
        self.block_length = block_length
        self.device = device
        self.blocks = blocks
        self.windows: WindowSegments | None = None
        if blocks > 1:
            from vllm_dllm.families.block_causal.window_segments import WindowSegments

            self.windows = WindowSegments(block_length, rows, device, blocks)

    def metadata(self, batch: AttentionBatch) -> dict[str, Any]:
        """See `AttentionRule`; raises for a full CUDA graph that would give wrong answers."""
        given = batch.input
        query_lengths = given.num_scheduled_tokens
        if (query_lengths <= self.block_length).all():
            # Each query lies inside one block, so every request is already a segment.
            return batch.one_query_per_request(causal=False)
        # A capture must read the same tensors as the graph's replays.
        persists = batch.full or batch.common["for_cudagraph_capture"]
        are_windows = (query_lengths == self.blocks * self.block_length).all()
        if persists and are_windows and self.windows is not None:
            return self.windows.metadata(batch)
        if batch.full:
            raise RuntimeError(
                f"a full CUDA graph was chosen for a query of {query_lengths.max()} tokens, but "
                f"it can replay queries of one block ({self.block_length}) only; set "
                "cudagraph_mode to FULL_AND_PIECEWISE or FULL_DECODE_ONLY"
            )
        row, query_start, hidden_keys = split_into_blocks(query_lengths, self.block_length)
        on_device = to_device(row, self.device)
        bound = given.seq_lens_cpu_upper_bound[torch.from_numpy(row)]
        return build_attn_metadata(
            num_reqs=len(row),
            query_start_loc_gpu=to_device(query_start, self.device),
            query_start_loc_cpu=torch.from_numpy(query_start),
            max_query_len=int(np.diff(query_start).max()),
            seq_lens=given.seq_lens[on_device] - to_device(hidden_keys, self.device),
            seq_lens_cpu_upper_bound=bound - torch.from_numpy(hidden_keys),
            block_tables=tuple(table[on_device] for table in batch.block_tables),
            causal=False,
            **batch.common,
        )


def block_causal_rules(slots: SlotState) -> MaskRules:
    """The rules for this package's own backend: prompts and canvases share one rule."""
    from vllm_dllm.attention.backend import MaskRules

    rules = MaskRules(len(slots.phase), slots.device)
    rules.rule.block.fill_(slots.kind.block_length)
    return rules


def split_into_blocks(
    query_lengths: np.ndarray, block_length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut queries, whose lengths ``[rows]`` are at least 1, into segments at multiples of L.

    Every prefill chunk and every canvas starts on a block boundary, so positions inside the query
    fall into the same blocks as positions inside the sequence.

    Returns:
        int32 arrays: ``[segments]``, the row that a segment belongs to; ``[segments + 1]``, a
        segment's first token, counted over the batch, and the number of tokens at the end; and
        ``[segments]``, how many of its row's newest keys a segment does not see.
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
    return row, query_start, (length_of_row - end).astype(np.int32)
