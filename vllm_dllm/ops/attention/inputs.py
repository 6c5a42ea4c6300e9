"""The arguments of paged attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_dllm.ops.attention.masks import MaskRule


@dataclass(frozen=True)
class PagedKV:
    """A layer's keys and values in pages."""

    # [pages, page size, KV heads, head size] in any floating dtype, including float8; any
    # strides, as long as the last dimension is contiguous.
    keys: torch.Tensor
    values: torch.Tensor
    # Float32 tensors of one element, by which the stored numbers are multiplied; None for 1.
    key_scale: torch.Tensor | None = None
    value_scale: torch.Tensor | None = None


@dataclass(frozen=True)
class QueryBatch:
    """The requests of a batch. Tensors are int32 on the device."""

    # [requests + 1], the index in the batch of the first token of each request's query, and the
    # end of the last query. A request without tokens is padding, and its other numbers are ignored.
    query_start: torch.Tensor
    seq_lens: torch.Tensor  # [requests], tokens of each sequence, including its query
    page_table: torch.Tensor  # [requests, pages], ids of each sequence's pages
    rule: MaskRule  # which keys each request's queries see, tensors [requests]
    max_query_len: int  # upper bound on the tokens of a query; a number on the host
    max_seq_len: int  # upper bound on the tokens of a sequence; a number on the host


@dataclass(frozen=True)
class AttentionLayer:
    """The properties of a layer that are the same for all requests."""

    scale: float  # the factor applied to the scores
    window_width: int = 0  # W of a sliding window, 0 for a layer without one
    soft_cap: float = 0.0  # scores become ``cap * tanh(score / cap)``; 0 for no cap
    # Float [heads], a score per head that takes a share of the softmax but adds no value.
    sinks: torch.Tensor | None = None
