"""Paged attention straight from the predicates of `masks`: the reference that tests compare with.

It computes one request at a time, with all scores in one matrix. Only tests and benchmarks import
this module.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_dllm.ops.attention.inputs import AttentionLayer, PagedKV, QueryBatch
from vllm_dllm.ops.attention.masks import Mask, QuerySpan


def attention_reference(
    query: torch.Tensor,
    kv: PagedKV,
    queries: QueryBatch,
    layer: AttentionLayer,
    masks: Sequence[Mask],
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Attention of a batch, ``[tokens, heads, head size]`` in `dtype`.

    The arguments are those of `launch_triton.paged_attention`, with a mask for each request in
    place of its rule. A query that sees no key gives zeros; tokens that do not belong to a query
    are NaN.
    """
    out = torch.full_like(query, torch.nan, dtype=dtype)
    start, seq_lens = queries.query_start.tolist(), queries.seq_lens.tolist()
    for row, mask in enumerate(masks):
        tokens = slice(start[row], start[row + 1])
        length = tokens.stop - tokens.start
        if length == 0:
            continue
        span = QuerySpan(seq_lens[row] - length, seq_lens[row])
        keys = _of_sequence(kv.keys, queries.page_table[row], span.end, kv.key_scale, dtype)
        values = _of_sequence(kv.values, queries.page_table[row], span.end, kv.value_scale, dtype)
        visible = mask.dense(span, query.device)
        out[tokens] = _attend(query[tokens].to(dtype), keys, values, visible, layer)
    return out


def _of_sequence(
    pages: torch.Tensor,
    page_table: torch.Tensor,
    length: int,
    scale: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """One sequence's keys or values, ``[length, KV heads, head size]``."""
    count = -(-length // pages.shape[1])
    vectors = pages[page_table[:count].long()].to(dtype).flatten(0, 1)[:length]
    return vectors if scale is None else vectors * scale.to(dtype)


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    layer: AttentionLayer,
) -> torch.Tensor:
    """One request: ``[n, heads, d]``, ``[m, KV heads, d]`` twice, bool ``[n, m]``."""
    group = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query, keys) * layer.scale
    if layer.soft_cap:
        scores = layer.soft_cap * (scores / layer.soft_cap).tanh()
    scores = scores.masked_fill(~visible, -torch.inf)
    sink = torch.full((*scores.shape[:2], 1), -torch.inf, dtype=scores.dtype, device=scores.device)
    if layer.sinks is not None:
        sink = layer.sinks.to(scores.dtype)[:, None, None].expand_as(sink)
    weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    # A row that sees no key and has no sink is 0/0; its result is 0.
    return torch.einsum("hqk,khd->qhd", weights.nan_to_num(0.0), values)
