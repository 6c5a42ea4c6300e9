"""Paged attention by the rules of `masks`, one request at a time with all scores in one matrix."""

from itertools import pairwise

import torch

from vllm_dllm.ops.attention.inputs import AttentionLayer, PagedKV, QueryBatch
from vllm_dllm.ops.attention.masks import MaskRule, QuerySpan, visible


def attention_reference(
    query: torch.Tensor,
    kv: PagedKV,
    queries: QueryBatch,
    layer: AttentionLayer,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Attention of a batch in `dtype`; the other arguments are those of `paged_attention`.

    A query that sees no key gives zeros; tokens that do not belong to a query are NaN.
    """
    out = torch.full_like(query, torch.nan, dtype=dtype)
    group = query.shape[1] // kv.keys.shape[2]
    sinks = torch.full_like(query[0, :, 0], -torch.inf) if layer.sinks is None else layer.sinks
    for row, (first, end) in enumerate(pairwise(queries.query_start.tolist())):
        if first == end:
            continue
        length = int(queries.seq_lens[row])
        rule = MaskRule(*(int(numbers[row]) for numbers in queries.rule))
        span = QuerySpan(length - (end - first), length)
        seen = visible(span, rule, layer.window_width, query.device)
        pages = queries.page_table[row, : -(-length // kv.keys.shape[1])].long()
        keys, values = (
            stored[pages].to(dtype).flatten(0, 1)[:length].repeat_interleave(group, 1)
            for stored in (kv.keys, kv.values)
        )
        keys = keys if kv.key_scale is None else keys * kv.key_scale.to(dtype)
        values = values if kv.value_scale is None else values * kv.value_scale.to(dtype)
        scores = torch.einsum("qhd,khd->hqk", query[first:end].to(dtype), keys) * layer.scale
        if layer.soft_cap:
            scores = layer.soft_cap * (scores / layer.soft_cap).tanh()
        sink = sinks.to(dtype)[:, None, None].expand(-1, end - first, 1)
        weights = torch.cat([scores.masked_fill(~seen, -torch.inf), sink], -1).softmax(-1)
        # A row that sees no key and has no sink is 0/0; its result is 0.
        out[first:end] = torch.einsum("hqk,khd->qhd", weights[..., :-1].nan_to_num(0.0), values)
    return out
