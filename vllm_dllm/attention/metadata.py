"""Attention rules: which keys a batch's queries see, said in the words of vLLM's backends.

*Virtual sequences*: in LLaDA2 a position sees its whole block and everything before it. A
prefill chunk is therefore one segment per block, each non-causal, each ending where its block
ends. Handing the segments to the attention backend as if they were requests of their own is
exact, because the keys and values of the whole batch are written before any of them is read,
and it needs nothing of the backend but non-causal attention.

*Per-request causality*: in DiffusionGemma prompts and commits are causal, a canvas that is
denoised is not. Backends take that as a tensor with one flag a request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata

from vllm_dllm.worker.slots import Phase, SlotState


@dataclass(frozen=True)
class Batch:
    """What an attention rule is given.

    Attributes:
        input: vLLM's ``InputBatch``.
        full: a full CUDA graph will replay; tensors must be persistent and padded.
        block_tables: one ``[rows, pages]`` tensor for each KV cache group.
        common: what `build_attn_metadata` gets in any case.
    """

    input: Any
    full: bool
    block_tables: tuple[torch.Tensor, ...]
    common: dict[str, Any]

    @property
    def rows(self) -> int:
        """Rows of the metadata: requests, with padding under a full graph."""
        return self.input.num_reqs_after_padding if self.full else self.input.num_reqs

    @property
    def furthest(self) -> int:
        """Most tokens of a sequence, or more."""
        return int(self.input.seq_lens_cpu_upper_bound[: self.rows].max())

    def as_it_is(self, causal: bool | torch.Tensor) -> dict[str, Any]:
        """Metadata with one query for each request."""
        batch, rows = self.input, self.rows
        return build_attn_metadata(
            num_reqs=rows,
            query_start_loc_gpu=batch.query_start_loc[: rows + 1],
            query_start_loc_cpu=torch.from_numpy(batch.query_start_loc_np[: rows + 1]),
            max_query_len=batch.max_query_len or int(batch.num_scheduled_tokens.max()),
            seq_lens=batch.seq_lens,
            seq_lens_cpu_upper_bound=batch.seq_lens_cpu_upper_bound,
            block_tables=self.block_tables,
            causal=causal,
            **self.common,
        )


class AttentionRule(Protocol):
    """How a model's queries see keys."""

    def metadata(self, batch: Batch) -> dict[str, Any]:
        """Attention metadata for every layer."""
        ...


class BlockCausal:
    """LLaDA2: a canvas is one non-causal query, a prefill chunk is one for each of its blocks."""

    def __init__(self, block_length: int, device: torch.device) -> None:
        self.block_length = block_length
        self.device = device

    def metadata(self, batch: Batch) -> dict[str, Any]:
        """See `AttentionRule`."""
        given = batch.input
        query_lengths, drafts = given.num_scheduled_tokens, given.num_draft_tokens_per_req
        if batch.full or (query_lengths <= self.block_length).all():
            # Each query lies inside one block: requests are segments as they are.
            return batch.as_it_is(causal=False)
        whole = query_lengths == drafts if drafts is not None else query_lengths < 0
        segments = split_into_blocks(query_lengths, whole, self.block_length)
        row = torch.from_numpy(segments.row).to(self.device, non_blocking=True)
        cut = torch.from_numpy(segments.cut).to(self.device, non_blocking=True)
        start = torch.from_numpy(segments.start)
        bound = given.seq_lens_cpu_upper_bound[torch.from_numpy(segments.row)]
        return build_attn_metadata(
            num_reqs=len(segments),
            query_start_loc_gpu=start.to(self.device, non_blocking=True),
            query_start_loc_cpu=start,
            max_query_len=segments.longest,
            seq_lens=given.seq_lens[row] - cut,
            seq_lens_cpu_upper_bound=bound - torch.from_numpy(segments.cut),
            block_tables=tuple(table[row] for table in batch.block_tables),
            causal=False,
            **batch.common,
        )


class CausalUnlessDenoised:
    """DiffusionGemma: causal prompts and commits, bidirectional canvases, in one batch."""

    def __init__(self, slots: SlotState) -> None:
        self.slots = slots
        # Persistent, for full CUDA graphs, and int32: FlashAttention takes no other dtype.
        self.causal = torch.zeros(len(slots.phase), dtype=torch.int32, device=slots.device)

    def metadata(self, batch: Batch) -> dict[str, Any]:
        """See `AttentionRule`."""
        requests = batch.input.num_reqs
        phase = self.slots.phase[batch.input.idx_mapping[:requests]]
        self.causal[:requests].copy_(phase != Phase.DENOISE)
        self.causal[requests : batch.rows].fill_(0)
        return batch.as_it_is(causal=self.causal[: batch.rows])


@dataclass(frozen=True)
class Segments:
    """Query segments of a batch, in query order. All arrays are int32 ``[segments]``.

    Attributes:
        row: batch row that the segment belongs to.
        start: first query token, counted over the batch; one longer than the others,
            it ends with the number of tokens.
        cut: how many of its row's newest keys the segment does not see.
        longest: most query tokens in a segment.
    """

    row: np.ndarray
    start: np.ndarray
    cut: np.ndarray
    longest: int

    def __len__(self) -> int:
        return len(self.row)


def split_into_blocks(query_lengths: np.ndarray, whole: np.ndarray, block_length: int) -> Segments:
    """Cut each row's query at multiples of the block length.

    The scheduler starts every prefill chunk on a block boundary, so positions inside the
    query and inside the sequence fall into the same blocks.

    Args:
        query_lengths: int ``[rows]``, query tokens of each row, at least 1.
        whole: bool ``[rows]``, rows that stay one segment (a canvas is one block already).
        block_length: L.
    """
    rows: np.ndarray = np.arange(len(query_lengths), dtype=np.int32)
    counts = np.where(whole, 1, -(-query_lengths // block_length))
    row: np.ndarray = np.repeat(rows, counts)
    nth = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    length_of_row = query_lengths[row]
    begin = nth * block_length
    end = np.where(whole[row], length_of_row, np.minimum(begin + block_length, length_of_row))
    row_start = np.cumsum(query_lengths) - query_lengths
    start: np.ndarray = np.empty(len(row) + 1, dtype=np.int32)
    start[:-1] = row_start[row] + begin
    start[-1] = query_lengths.sum()
    return Segments(
        row=row,
        start=start,
        cut=(length_of_row - end).astype(np.int32),
        longest=int((end - begin).max()),
    )
