"""Batches for the tests of the attention kernel, and the check against the reference.

The error budget is the error that the same computation in eager PyTorch in the same dtype has
against float64: the kernel's root mean square error may be as large and its largest error twice as
large. In float32, where sums run in another order, they may be 1.5 and 3 times as large (2.14 times
was seen on an H200).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tests.support.ops.interpreter import interpreted
from vllm_dllm.ops.attention import masks
from vllm_dllm.ops.attention.inputs import AttentionLayer, PagedKV, QueryBatch
from vllm_dllm.ops.attention.masks import Mask, MaskRule
from vllm_dllm.ops.attention.reference import attention_reference

kernel = interpreted("vllm_dllm.ops.attention.launch_triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WINDOW = 20
# Small tiles: several of each kind (masked, whole, masked again) in short sequences.
SMALL = kernel.Tiles(rows=32, keys=32, warps=4, stages=1, splits=1)
SPLIT = replace(SMALL, splits=4)
HALVES = replace(SMALL, splits=2)
# Tokens of the query and of the whole sequence.
AWKWARD = ((1, 1), (31, 31), (33, 63), (63, 129), (129, 129), (0, 0), (1, 130), (31, 32))


@dataclass
class Case:
    """A batch in pages whose unused slots are NaN, and its masks."""

    query: torch.Tensor
    kv: PagedKV
    queries: QueryBatch
    layer: AttentionLayer
    masks: list[Mask]

    @property
    def tokens(self) -> int:
        return int(self.queries.query_start[-1])

    def run(self, tiles=None) -> torch.Tensor:
        out = torch.full_like(self.query, torch.nan)
        kernel.paged_attention(self.query, self.kv, self.queries, self.layer, out, tiles)
        return out

    def reference(self, dtype: torch.dtype) -> torch.Tensor:
        return attention_reference(
            self.query, self.kv, self.queries, self.layer, self.masks, dtype
        )[: self.tokens].double()

    def check(self, tiles=None) -> torch.Tensor:
        """Within the budget, every row of a query written, no other row touched."""
        out, dtype = self.run(tiles), self.query.dtype
        assert out[self.tokens :].isnan().all(), "a row of no query was written"
        found, truth = out[: self.tokens].double(), self.reference(torch.float64)
        assert found.isfinite().all(), "a row was not written"
        error, budget = found - truth, self.reference(dtype) - truth
        exact = dtype == torch.float32
        floor = torch.finfo(dtype).eps * truth.abs().max() / 8
        assert rms(error) <= (1.5 if exact else 1.0) * rms(budget) + floor
        assert error.abs().max() <= (3 if exact else 2) * budget.abs().max() + floor
        return out


def rms(error: torch.Tensor) -> torch.Tensor:
    return error.square().mean().sqrt()


def make_case(
    lengths,
    which: list[Mask],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    size: int = 32,
    page: int = 16,
    dtype: torch.dtype = torch.float32,
    layer: AttentionLayer | None = None,
) -> Case:
    """Random numbers for requests of the given (query tokens, sequence tokens) and masks."""
    generator = torch.Generator().manual_seed(0)
    rows, pages = len(lengths), max(-(-end // page) for _, end in lengths) + 1
    # Pages in no order; two more than are used.
    table = torch.randperm(rows * pages + 2, generator=generator)[: rows * pages].view(rows, pages)
    store = torch.full((rows * pages + 2, page, kv_heads, 2 * size), torch.nan)
    for row, (_, end) in enumerate(lengths):
        numbers = torch.randn(pages * page, kv_heads, 2 * size, generator=generator)
        numbers[end:] = torch.nan
        store[table[row]] = numbers.view(pages, page, kv_heads, -1)
    store = store.to(DEVICE, dtype)
    start = torch.tensor([0, *(query for query, _ in lengths)]).cumsum(0)
    query = torch.randn(int(start[-1]) + 3, heads, size, generator=generator)
    rule = MaskRule(
        torch.tensor([mask.rule.block for mask in which], dtype=torch.int32, device=DEVICE),
        torch.tensor([int(mask.rule.window) for mask in which], dtype=torch.int32, device=DEVICE),
    )
    queries = QueryBatch(
        start.int().to(DEVICE),
        torch.tensor([end for _, end in lengths], dtype=torch.int32, device=DEVICE),
        table.int().to(DEVICE),
        rule,
        max_query_len=max(query for query, _ in lengths),
        max_seq_len=max(end for _, end in lengths),
    )
    kv = PagedKV(store[..., :size], store[..., size:])
    layer = layer or AttentionLayer(size**-0.5, max(mask.window_width for mask in which))
    return Case(query.to(DEVICE, dtype), kv, queries, layer, which)


ALL_MASKS = (
    masks.causal(),
    masks.block_causal(32),
    masks.bidirectional(),
    masks.window_causal(WINDOW),
    masks.window_symmetric(WINDOW),
    masks.window_reference(WINDOW),
)
