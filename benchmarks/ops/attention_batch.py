"""Layers and batches of the attention benchmark, with random numbers in them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_dllm.ops.attention import masks
from vllm_dllm.ops.attention.inputs import AttentionLayer, PagedKV, QueryBatch
from vllm_dllm.ops.attention.masks import Mask, MaskRule, QuerySpan

PAGE = 128
# Triton's interpreter multiplies no bfloat16.
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32


@dataclass(frozen=True)
class Shape:
    """A layer and a batch of equal requests.

    Attributes:
        name: as printed.
        heads, kv_heads, size: of the layer.
        mask: of every request.
        context: cached tokens of a request.
        query: query tokens of a request.
        requests: of the batch.
    """

    name: str
    heads: int
    kv_heads: int
    size: int
    mask: Mask
    context: int
    query: int
    requests: int

    @property
    def span(self) -> QuerySpan:
        return QuerySpan(self.context, self.context + self.query)

    def keys_seen(self) -> tuple[int, int]:
        """(query-key pairs, distinct keys) of one request."""
        q = torch.arange(*self.span)
        first, end = masks.interval(q, self.span, self.mask.rule, self.mask.window_width)
        return int((end - first).sum()), int(end.max() - first.min())

    def flops(self) -> int:
        """Of a batch: two matrix products over the pairs that are seen."""
        return 4 * self.requests * self.heads * self.size * self.keys_seen()[0]

    def bytes(self) -> int:
        """Of a batch: keys and values that are seen, read once; queries and results."""
        rows = 2 * self.kv_heads * self.keys_seen()[1] + 2 * self.heads * self.query
        return 2 * self.requests * self.size * rows


@dataclass
class Batch:
    """A shape with numbers in it."""

    shape: Shape
    query: torch.Tensor
    store: torch.Tensor
    queries: QueryBatch
    layer: AttentionLayer

    @property
    def kv(self) -> PagedKV:
        size = self.shape.size
        return PagedKV(self.store[..., :size], self.store[..., size:])

    def contiguous(self) -> tuple[torch.Tensor, ...]:
        """QueryBatch, keys and values as ``[requests, heads, tokens, head size]``, for others."""
        shape = self.shape
        pages = self.store[self.queries.page_table.long()].flatten(1, 2)[:, : shape.span.end]
        keys, values = pages.transpose(1, 2).split(shape.size, -1)
        query = self.query.view(shape.requests, shape.query, shape.heads, shape.size)
        return query.transpose(1, 2).contiguous(), keys.contiguous(), values.contiguous()


def make_batch(shape: Shape, device: torch.device) -> Batch:
    generator = torch.Generator(device).manual_seed(0)
    pages = -(-shape.span.end // PAGE)
    size = (shape.requests * pages, PAGE, shape.kv_heads, 2 * shape.size)
    store = torch.randn(size, generator=generator, device=device, dtype=DTYPE)
    table = torch.randperm(shape.requests * pages, generator=generator, device=device)
    whole = torch.full((shape.requests,), 0, dtype=torch.int32, device=device)
    queries = QueryBatch(
        query_start=torch.arange(shape.requests + 1, dtype=torch.int32, device=device)
        * shape.query,
        seq_lens=whole + shape.span.end,
        page_table=table.view(shape.requests, pages).int(),
        rule=MaskRule(whole + shape.mask.rule.block, whole + int(shape.mask.rule.window)),
        max_query_len=shape.query,
        max_seq_len=shape.span.end,
    )
    query = torch.randn(
        (shape.requests * shape.query, shape.heads, shape.size),
        generator=generator,
        device=device,
        dtype=DTYPE,
    )
    return Batch(
        shape, query, store, queries, AttentionLayer(shape.size**-0.5, shape.mask.window_width)
    )


def shapes(quick: bool) -> list[Shape]:
    if quick:
        return [
            Shape("canvas", 4, 2, 32, masks.block_causal(32), 96, 32, 2),
            Shape("prefill", 4, 2, 32, masks.block_causal(32), 0, 160, 1),
            Shape("window", 4, 2, 32, masks.window_symmetric(48), 96, 32, 2),
            Shape("reference", 4, 2, 32, masks.window_reference(48), 96, 64, 2),
        ]
    chosen = []
    for context in (1024, 8192, 32768):
        for requests in (1, 16, 64):
            size = f"{context // 1024}k x{requests}"
            llada2 = masks.block_causal(32)
            chosen.append(Shape(f"llada2 canvas {size}", 16, 4, 128, llada2, context, 32, requests))
            for mask in (masks.window_symmetric(1024), masks.window_reference(1024)):
                name = f"gemma {mask.name} {size}"
                chosen.append(Shape(name, 8, 4, 256, mask, context, 256, requests))
            name = f"gemma global {size}"
            chosen.append(Shape(name, 8, 2, 512, masks.bidirectional(), context, 256, requests))
    for prompt in (2048, 8192):
        name = f"llada2 prefill {prompt // 1024}k"
        chosen.append(Shape(name, 16, 4, 128, masks.block_causal(32), 0, prompt, 1))
    return chosen
