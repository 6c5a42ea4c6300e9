"""LLaDA2's attention: a position sees its whole block and everything before the block.

A prefill chunk is one segment for each of its blocks; each segment is non-causal and ends where its
block ends. Segments are handed to vLLM's attention backend as if they were requests of their own
(*virtual sequences*). That is exact, because the keys and values of the whole batch are written
before any of them is read, and it asks nothing of the backend but non-causal attention.

Our own backend takes the block length itself and needs no segments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata

from vllm_dllm.attention.metadata import AttentionBatch
from vllm_dllm.worker.slots import SlotState

if TYPE_CHECKING:
    from vllm_dllm.attention.backend import MaskRules


class BlockCausal:
    """An `AttentionRule`: a canvas is one non-causal query, a prefill chunk one for each block.

    The number of segments depends on the batch, so a full CUDA graph replays only batches whose
    queries lie inside one block each. `attention.routes` chooses the mode of graphs accordingly.
    """

    def __init__(self, block_length: int, device: torch.device) -> None:
        self.block_length = block_length
        self.device = device

    def metadata(self, batch: AttentionBatch) -> dict[str, Any]:
        """See `AttentionRule`.

        Raises:
            RuntimeError: a full CUDA graph would replay a query longer than a block, and answer
                wrongly.
        """
        given = batch.input
        query_lengths, drafts = given.num_scheduled_tokens, given.num_draft_tokens_per_req
        if (query_lengths <= self.block_length).all():
            # Each query lies inside one block: requests are segments as they are.
            return batch.one_query_per_request(causal=False)
        if batch.full:
            raise RuntimeError(
                f"a full CUDA graph was chosen for a query of {query_lengths.max()} tokens, but "
                f"it can replay queries of one block ({self.block_length}) only; set "
                "cudagraph_mode to FULL_AND_PIECEWISE or FULL_DECODE_ONLY"
            )
        whole = query_lengths == drafts if drafts is not None else query_lengths < 0
        segments = split_into_blocks(query_lengths, whole, self.block_length)
        row = torch.from_numpy(segments.row).to(self.device, non_blocking=True)
        hidden_keys = torch.from_numpy(segments.hidden_keys).to(self.device, non_blocking=True)
        query_start = torch.from_numpy(segments.query_start)
        bound = given.seq_lens_cpu_upper_bound[torch.from_numpy(segments.row)]
        return build_attn_metadata(
            num_reqs=len(segments),
            query_start_loc_gpu=query_start.to(self.device, non_blocking=True),
            query_start_loc_cpu=query_start,
            max_query_len=segments.max_query_len,
            seq_lens=given.seq_lens[row] - hidden_keys,
            seq_lens_cpu_upper_bound=bound - torch.from_numpy(segments.hidden_keys),
            block_tables=tuple(table[row] for table in batch.block_tables),
            causal=False,
            **batch.common,
        )


def block_causal_rules(slots: SlotState) -> MaskRules:
    """The same for our own backend: prompts and canvases have one rule."""
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


def split_into_blocks(query_lengths: np.ndarray, whole: np.ndarray, block_length: int) -> Segments:
    """Cut each row's query at multiples of the block length.

    The scheduler starts every prefill chunk on a block boundary, so positions inside the query fall
    into the same blocks as positions inside the sequence.

    Args:
        query_lengths: int ``[rows]``, query tokens of each row, at least 1.
        whole: bool ``[rows]``, rows that stay one segment (a canvas is one block already).
        block_length: L.
    """
    rows: np.ndarray = np.arange(len(query_lengths), dtype=np.int32)
    counts = np.where(whole, 1, -(-query_lengths // block_length))
    row: np.ndarray = np.repeat(rows, counts)
    # The place of each segment within its row.
    nth = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    length_of_row = query_lengths[row]
    begin = nth * block_length
    end = np.where(whole[row], length_of_row, np.minimum(begin + block_length, length_of_row))
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
