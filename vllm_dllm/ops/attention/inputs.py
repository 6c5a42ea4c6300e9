"""The arguments of paged attention: cached keys and values, the queries, a layer's constants.

The Triton kernels (`launch_triton`) and the reference that tests compare them with (`reference`)
take the same arguments.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_dllm.ops.attention.masks import MaskRule


@dataclass(frozen=True)
class PagedKV:
    """A layer's keys and values in pages.

    Attributes:
        keys, values: ``[pages, page size, KV heads, head size]`` in any floating dtype, including
            float8; any strides, as long as the last dimension is contiguous.
        key_scale, value_scale: float32 tensors of one element on the same device, by which the
            stored numbers are multiplied; None for 1.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scale: torch.Tensor | None = None
    value_scale: torch.Tensor | None = None


@dataclass(frozen=True)
class QueryBatch:
    """The requests of a batch. Tensors are int32 on the device.

    Attributes:
        query_start: ``[requests + 1]``, the index in the batch of the first token of each request's
            query, and the end of the last query. A request without tokens is padding, and its other
            numbers are ignored.
        seq_lens: ``[requests]``, tokens of each sequence, including its query.
        page_table: ``[requests, pages]``, ids of each sequence's pages.
        rule: which keys each request's queries see, tensors ``[requests]``.
        max_query_len: upper bound on the tokens of a query; a number on the host.
        max_seq_len: upper bound on the tokens of a sequence; a number on the host.
    """

    query_start: torch.Tensor
    seq_lens: torch.Tensor
    page_table: torch.Tensor
    rule: MaskRule
    max_query_len: int
    max_seq_len: int


@dataclass(frozen=True)
class AttentionLayer:
    """The properties of a layer that are the same for all requests.

    Attributes:
        scale: the factor applied to the scores.
        window_width: W of a sliding window, 0 for a layer without one.
        soft_cap: scores become ``cap * tanh(score / cap)``; 0 for no cap.
        sinks: float ``[heads]``, an additional score per head that takes a share of the softmax but
            adds no value.
    """

    scale: float
    window_width: int = 0
    soft_cap: float = 0.0
    sinks: torch.Tensor | None = None
