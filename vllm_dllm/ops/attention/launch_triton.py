"""Paged attention with a mask rule for each request: how the kernels are launched.

A query tile holds the whole group of heads that shares a KV head. If the batch alone gives the
device too few programs, the keys of a query tile are split over several programs, and a second
kernel merges their results (split-K; "Flash-Decoding", Dao et al., 2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from vllm_dllm.ops.attention.inputs import AttentionLayer, PagedKV, QueryBatch
from vllm_dllm.ops.attention.kernel_triton import attention_kernel, merge_kernel
from vllm_dllm.ops.device import multiprocessors

MAX_SPLITS = 32
# A split with fewer keys than this costs more to merge than it saves.
MIN_KEYS_PER_SPLIT = 256


@dataclass(frozen=True)
class Tiles:
    """How the work is divided among programs."""

    # Query rows of a program: tokens times the heads that share a KV head. A power of two, at least
    # 16 and at least that number of heads.
    rows: int
    keys: int  # keys of a tile, a power of two, at least 16
    warps: int  # warps of a program
    stages: int  # stages of its software pipeline
    splits: int = 0  # programs that share a query tile's keys, a power of two; 0 chooses by shape


def paged_attention(
    query: torch.Tensor,
    kv: PagedKV,
    queries: QueryBatch,
    layer: AttentionLayer,
    out: torch.Tensor,
    tiles: Tiles | None = None,
) -> None:
    """Attention of a batch, written to ``out``.

    Nothing is copied to the host, and every launch depends only on shapes, `queries.max_query_len`
    and `queries.max_seq_len`, so the call may be captured into a CUDA graph.

    Args:
        query: ``[tokens, heads, head size]``, float32, bfloat16 or float16, contiguous in the last
            dimension. At most 2^31 - 1 tokens.
        kv: keys and values, including those of this step's tokens.
        queries: the requests and their rules.
        layer: the layer's constants.
        out: of the shape and dtype of `query`. A query that sees no key gives zeros; tokens that do
            not belong to a query are left unchanged.
        tiles: how to divide the work, or None for `default_tiles`.

    Raises:
        ValueError: the head size is above 512, the number of heads is not a multiple of the number
            of KV heads, or keys and values have different strides.
    """
    tokens, heads, head_size = query.shape
    kv_heads = kv.keys.shape[2]
    if head_size > 512 or heads % kv_heads or kv.keys.stride() != kv.values.stride():
        raise ValueError(
            f"paged_attention: {heads} heads of {head_size} on {kv_heads} KV heads; it takes head "
            "sizes up to 512, whole groups of heads, and keys and values of the same strides"
        )
    if tokens == 0 or len(queries.seq_lens) == 0:
        return
    requests, group = len(queries.seq_lens), heads // kv_heads
    tiles = tiles or default_tiles(head_size, query.element_size(), group, queries.max_query_len)
    rows = max(tiles.rows, 16, triton.next_power_of_2(group))
    tiles_per_request = triton.cdiv(queries.max_query_len, rows // group)
    # Where lengths differ a lot, a program finds its request by a binary search over the query
    # lengths, so that each request gets only the tiles that it needs: at most one beyond its full
    # ones. Otherwise each gets as many as the longest query, and a division finds the request.
    query_tiles = min(requests * tiles_per_request, tokens // (rows // group) + requests)
    search = query_tiles < requests * tiles_per_request
    at_once = multiprocessors(query.device) * (8 // tiles.warps)
    splits = tiles.splits or _splits(at_once // (query_tiles * kv_heads), queries, layer)
    partial = _split_results(query, splits)
    padded = max(16, triton.next_power_of_2(head_size))  # a size of matrix instructions
    attention_kernel[(query_tiles, kv_heads, splits)](
        out, *partial, query, kv.keys, kv.values, kv.key_scale, kv.value_scale, layer.sinks,
        queries.page_table, queries.query_start, queries.seq_lens, *queries.rule,
        layer.scale, layer.soft_cap, layer.window_width, requests, tiles_per_request, splits,
        *out.stride()[:2], *query.stride()[:2], *kv.keys.stride()[:3], queries.page_table.stride(0),
        HEADS=heads, GROUP=group, HEAD=head_size, HEAD_PADDED=padded, PAGE=kv.keys.shape[1],
        ROWS=rows, KEYS=tiles.keys, SEARCH=search, SPLIT=splits > 1,
        WINDOWED=layer.window_width > 0, CAPPED=layer.soft_cap > 0,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    if splits > 1:
        merge_kernel[(tokens, heads)](
            out, *partial, kv.value_scale, layer.sinks, queries.query_start, requests,
            *out.stride()[:2],
            HEADS=heads, HEAD=head_size, HEAD_PADDED=padded, SPLITS=splits, num_warps=4,
        )  # fmt: skip


def default_tiles(head_size: int, element_size: int, group: int, max_query_len: int) -> Tiles:
    """Tiles for a shape, chosen for 227 KiB of shared memory and 64 Ki registers (sm_90).

    `element_size` is that of the queries in bytes, and `group` the heads that share a KV head.
    """
    rows = min(128, max(16, triton.next_power_of_2(group * max_query_len)))
    if element_size > 2:
        # Float32 uses twice the bytes and no tensor cores; it is meant for exactness, not speed.
        return Tiles(min(rows, 64), 32 if head_size > 64 else 64, 4, 1 if head_size > 128 else 2)
    if head_size > 256:
        return Tiles(min(rows, 64), 32, 8, 2)
    if head_size > 128:
        return Tiles(rows, 64, 8 if rows > 64 else 4, 2)
    return Tiles(rows, 64, 8 if rows > 64 else 4, 3)


def _splits(free_programs: int, queries: QueryBatch, layer: AttentionLayer) -> int:
    """Programs that share the keys of a query tile, a power of two.

    There are as many as the device can run at once, `free_programs` for each program without a
    split, provided that each has enough keys to be worth the merge.
    """
    longest = queries.max_seq_len
    if layer.window_width:
        longest = min(longest, 2 * layer.window_width + queries.max_query_len)
    useful = min(free_programs, longest // MIN_KEYS_PER_SPLIT, MAX_SPLITS)
    return 1 << max(0, useful.bit_length() - 1)


def _split_results(query: torch.Tensor, splits: int) -> tuple[torch.Tensor | None, ...]:
    """Allocate the results that each split passes to the merge; three Nones without a split.

    They are sums of weighted values, float32 ``[tokens, heads, splits, head size]``, and the
    largest score and the sum of weights, ``[tokens, heads, splits]``.
    """
    if splits == 1:
        return None, None, None
    shape = (*query.shape[:2], splits)
    return tuple(
        torch.empty(size, dtype=torch.float32, device=query.device)
        for size in ((*shape, query.shape[2]), shape, shape)
    )
