"""Masks as predicates, and paged attention straight from them: what the kernels are compared with.

A predicate takes positions in a request's sequence, ``q`` of the query and ``k`` of the key, and
the request's `QuerySpan`; it knows nothing of batches, pages or tiles. Positions are ints, or
tensors that broadcast. Keys exist only in ``0 <= k < span.end``. The kernels take a `MaskRule`
instead, whose meaning is `interval`; `tests/ops/test_masks.py` proves that both mean the same.

`benchmarks/ops/attention.py` uses it as well, so that it imports nothing but torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from vllm_dllm.ops.attention.inputs import AttentionLayer, PagedKV, QueryBatch
from vllm_dllm.ops.attention.masks import WHOLE, MaskRule, WindowRule


class QuerySpan(NamedTuple):
    """A request's query: positions ``start <= q < end`` of a sequence of ``end`` tokens."""

    start: Any
    end: Any


# (q, k, span) to bool; ints or int tensors that broadcast.
Predicate = Callable[[Any, Any, QuerySpan], Any]


@dataclass(frozen=True)
class Mask:
    """A mask: its predicate, and the equivalent rule for a kernel.

    Attributes:
        name: the name as written in code, e.g. ``block_causal(32)``.
        sees: whether query q sees key k.
        rule: the equivalent rule for a kernel.
        window_width: W of its window, or 0 without one.
    """

    name: str
    sees: Predicate
    rule: MaskRule
    window_width: int = 0

    def dense(self, span: QuerySpan, device: torch.device | None = None) -> torch.Tensor:
        """The mask of one request, bool ``[queries, keys]``."""
        q = torch.arange(span.start, span.end, device=device)[:, None]
        k = torch.arange(span.end, device=device)[None, :]
        return torch.as_tensor(self.sees(q, k, span), device=device).expand(len(q), k.shape[1])


def causal() -> Mask:
    """A query sees itself and everything before it."""
    return Mask("causal", lambda q, k, span: k <= q, MaskRule(1, WindowRule.NONE))


def block_causal(length: int) -> Mask:
    """LLaDA2: a query sees its whole block and all blocks before it."""
    return Mask(
        f"block_causal({length})",
        lambda q, k, span: k // length <= q // length,
        MaskRule(length, WindowRule.NONE),
    )


def bidirectional() -> Mask:
    """A query sees every key."""
    return Mask(
        "bidirectional",
        lambda q, k, span: (q >= 0) & (k >= 0),
        MaskRule(WHOLE, WindowRule.NONE),
    )


def window_causal(width: int) -> Mask:
    """A query sees itself and the W - 1 tokens before it."""
    return Mask(
        f"window_causal({width})",
        lambda q, k, span: (k <= q) & (q - k < width),
        MaskRule(1, WindowRule.SYMMETRIC),
        width,
    )


def window_symmetric(width: int) -> Mask:
    """A query sees W - 1 tokens in both directions: a canvas in vLLM's DiffusionGemma."""
    return Mask(
        f"window_symmetric({width})",
        lambda q, k, span: (q - k < width) & (k - q < width),
        MaskRule(WHOLE, WindowRule.SYMMETRIC),
        width,
    )


def window_reference(width: int) -> Mask:
    """A query sees the W - 1 tokens before the canvas and the whole canvas: the authors' rule.

    In Hugging Face's transformers, DiffusionGemma masks a canvas this way while denoising it.
    """
    return Mask(
        f"window_reference({width})",
        lambda q, k, span: (q >= 0) & (k > span.start - width),
        MaskRule(WHOLE, WindowRule.REFERENCE),
        width,
    )


def interval(
    q: torch.Tensor, span: QuerySpan, rule: MaskRule, window_width: int
) -> tuple[torch.Tensor, ...]:
    """The keys ``first <= k < end`` that queries ``q`` see by a rule: what the kernel computes.

    Both edges grow with q. So the keys that any query of a run sees extend from the first query's
    first key to the last query's last key, and the keys from the last query's first key to the
    first query's last key are seen by all of them.

    Args:
        q: int ``[n]``, positions.
        span: the request's query.
        rule: the request's rule, as ints.
        window_width: W of the layer, or 0 for a layer without a window.

    Returns:
        ``first`` and ``end``, of q's shape.
    """
    first = torch.zeros_like(q)
    end = ((q // rule.block + 1) * rule.block).clamp(max=span.end)
    if window_width and rule.window == WindowRule.SYMMETRIC:
        first, end = (q - window_width + 1).clamp(min=0), end.minimum(q + window_width)
    elif window_width and rule.window == WindowRule.REFERENCE:
        first = torch.full_like(q, max(0, span.start - window_width + 1))
    return first, end


def attention_reference(
    query: torch.Tensor,
    kv: PagedKV,
    queries: QueryBatch,
    layer: AttentionLayer,
    masks: Sequence[Mask],
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Attention of a batch.

    Args:
        query: ``[tokens, heads, head size]``.
        kv: keys and values, including those of this step's tokens.
        queries: the requests; their rules are ignored.
        layer: the layer's constants.
        masks: one for each request.
        dtype: the dtype of the computation: float64 for the exact values against which an error
            budget is measured, the query's own dtype for what eager PyTorch computes.

    Returns:
        ``[tokens, heads, head size]`` in `dtype`. A query that sees no key gives zeros; tokens that
        do not belong to a query are NaN.
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
