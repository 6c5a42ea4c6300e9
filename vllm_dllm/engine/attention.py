"""Virtual sequences: a block-causal query as a list of plain non-causal ones.

In LLaDA2 a position sees its whole block and everything before it. A prefill chunk is
therefore one segment per block, each non-causal, each ending where its block ends. Handing
the segments to the attention backend as if they were requests of their own is exact,
because the keys and values of the whole batch are written before any of them is read,
and it needs nothing of the backend but non-causal attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


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
