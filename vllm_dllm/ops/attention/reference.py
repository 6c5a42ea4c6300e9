"""Paged attention straight from the predicates of `masks`: what its arguments are, and the oracle.

One request at a time, every score in one matrix. The kernel of `attention_triton` takes the same
arguments, with the masks' rules in place of the masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_dllm.ops.attention.masks import Mask, Rule, Span


@dataclass(frozen=True)
class PagedKV:
    """A layer's keys and values in pages.

    Attributes:
        keys, values: ``[pages, page size, KV heads, head size]`` in any floating dtype, float8
            too; any strides, but the last dimension contiguous.
        key_scale, value_scale: float32 of one element on the same device, what stored numbers
            are multiplied with; None for 1.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scale: torch.Tensor | None = None
    value_scale: torch.Tensor | None = None


@dataclass(frozen=True)
class Queries:
    """The requests of a batch. Tensors are int32 on the device.

    Attributes:
        start: ``[requests + 1]``, first token of each one's query in the batch, and the end of
            the last one's. A request of no token is padding, its other numbers are not read.
        seq_lens: ``[requests]``, tokens of each sequence, its query included.
        table: ``[requests, pages]``, ids of each sequence's pages.
        rule: which keys each request's queries see, tensors ``[requests]``.
        longest: most tokens of a query, or more; on the host.
        furthest: most tokens of a sequence, or more; on the host.
    """

    start: torch.Tensor
    seq_lens: torch.Tensor
    table: torch.Tensor
    rule: Rule
    longest: int
    furthest: int


@dataclass(frozen=True)
class Layer:
    """What is the same for all requests of a layer.

    Attributes:
        scale: factor of the scores.
        width: W of a sliding window, 0 for none.
        soft_cap: scores become ``cap * tanh(score / cap)``; 0 for none.
        sinks: float ``[heads]``, a score beside the keys' that takes weight and gives nothing.
    """

    scale: float
    width: int = 0
    soft_cap: float = 0.0
    sinks: torch.Tensor | None = None


def attention_reference(
    query: torch.Tensor,
    kv: PagedKV,
    queries: Queries,
    layer: Layer,
    masks: Sequence[Mask],
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Attention of a batch.

    Args:
        query: ``[tokens, heads, head size]``.
        kv: keys and values, those of this step's tokens included.
        queries: the requests; their rules are not read.
        layer: the layer's constants.
        masks: one for each request.
        dtype: what is computed in: float64 for an error budget's truth, the query's own for
            what eager PyTorch makes of it.

    Returns:
        ``[tokens, heads, head size]`` in `dtype`. A query that sees no key gives zeros; tokens
        that belong to no query are NaN.
    """
    out = torch.full_like(query, torch.nan, dtype=dtype)
    start, seq_lens = queries.start.tolist(), queries.seq_lens.tolist()
    for row, mask in enumerate(masks):
        tokens = slice(start[row], start[row + 1])
        length = tokens.stop - tokens.start
        if length == 0:
            continue
        span = Span(seq_lens[row] - length, seq_lens[row])
        keys = _rows(kv.keys, queries.table[row], span.end, kv.key_scale, dtype)
        values = _rows(kv.values, queries.table[row], span.end, kv.value_scale, dtype)
        seen = mask.dense(span, query.device)
        out[tokens] = _attend(query[tokens].to(dtype), keys, values, seen, layer)
    return out


def _rows(
    pages: torch.Tensor,
    table: torch.Tensor,
    length: int,
    scale: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """One sequence's keys or values, ``[length, KV heads, head size]``."""
    count = -(-length // pages.shape[1])
    found = pages[table[:count].long()].to(dtype).flatten(0, 1)[:length]
    return found if scale is None else found * scale.to(dtype)


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor, layer: Layer
) -> torch.Tensor:
    """One request: ``[n, heads, d]``, ``[m, KV heads, d]`` twice, bool ``[n, m]``."""
    group = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query, keys) * layer.scale
    if layer.soft_cap:
        scores = layer.soft_cap * (scores / layer.soft_cap).tanh()
    scores = scores.masked_fill(~seen, -torch.inf)
    sink = torch.full((*scores.shape[:2], 1), -torch.inf, dtype=scores.dtype, device=scores.device)
    if layer.sinks is not None:
        sink = layer.sinks.to(scores.dtype)[:, None, None].expand_as(sink)
    weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    # A row without any score at all is 0/0; it has nothing to give.
    return torch.einsum("hqk,khd->qhd", weights.nan_to_num(0.0), values)
