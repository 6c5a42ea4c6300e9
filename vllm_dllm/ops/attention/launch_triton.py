"""Paged attention with a rule for each request: how the kernels are launched.

A query tile holds the whole group of heads that shares a KV head. Where the batch alone gives too
few programs for the device, the keys are split over several and their results merged (split-K;
"Flash-Decoding", Dao et al., 2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from vllm_dllm.ops.attention.kernel_triton import attention_kernel, merge_kernel
from vllm_dllm.ops.attention.reference import Layer, PagedKV, Queries
from vllm_dllm.ops.device import multiprocessors

MAX_SPLITS = 32
# A split shorter than this many keys costs more in merging than it saves.
MIN_SPLIT = 256


@dataclass(frozen=True)
class Tiles:
    """How the work is cut.

    Attributes:
        rows: query rows of a program: tokens times the heads that share a KV head; at least 16
            and at least that number of heads, rounded up to a power of two.
        keys: keys of a tile, a power of two from 16 on.
        warps, stages: of the launch.
        splits: programs that share a tile's keys, a power of two; 0 chooses.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    splits: int = 0


def paged_attention(
    query: torch.Tensor,
    kv: PagedKV,
    queries: Queries,
    layer: Layer,
    out: torch.Tensor,
    tiles: Tiles | None = None,
) -> None:
    """Attention of a batch, written to ``out``.

    Nothing is copied to the host and every launch depends on shapes and on `queries.longest` and
    `queries.furthest` only, so it may be captured into a CUDA graph.

    Args:
        query: ``[tokens, heads, head size]``, float32, bfloat16 or float16; last dimension
            contiguous. At most 2^31 - 1 tokens; offsets are 64 bits wide.
        kv: keys and values, those of this step's tokens included.
        queries: the requests and their rules.
        layer: the layer's constants.
        out: as `query`. A query that sees no key gives zeros; tokens that belong to no query are
            left as they are.
        tiles: other than `default_tiles`.

    Raises:
        ValueError: a head size above 512, heads that are no multiple of the KV heads, or values
            with other strides than the keys'.
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
    group = heads // kv_heads
    cut = tiles or default_tiles(head_size, query.element_size(), group, queries.longest)
    plan = _Plan.make(query, kv_heads, queries, layer, cut)
    partial = _partial(query, plan.splits)
    attention_kernel[(plan.tiles, kv_heads, plan.splits)](
        out, *partial, query, kv.keys, kv.values, kv.key_scale, kv.value_scale, layer.sinks,
        queries.table, queries.start, queries.seq_lens, queries.rule.block, queries.rule.window,
        layer.scale, layer.soft_cap, layer.width,
        plan.requests, plan.tiles_per_request, plan.splits,
        *out.stride()[:2], *query.stride()[:2], *kv.keys.stride()[:3], queries.table.stride(0),
        HEADS=heads, GROUP=group, HEAD=head_size, HEAD_PADDED=_padded(head_size),
        PAGE=kv.keys.shape[1], ROWS=plan.rows, KEYS=cut.keys, SEARCH=plan.search,
        SPLIT=plan.splits > 1, WINDOWED=layer.width > 0, CAPPED=layer.soft_cap > 0,
        num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip
    if plan.splits > 1:
        merge_kernel[(tokens, heads)](
            out, *partial, kv.value_scale, layer.sinks, queries.start, plan.requests,
            *out.stride()[:2],
            HEADS=heads, HEAD=head_size, HEAD_PADDED=_padded(head_size), SPLITS=plan.splits,
            num_warps=4,
        )  # fmt: skip


def default_tiles(head_size: int, element_size: int, group: int, longest: int) -> Tiles:
    """Tiles by shape, made for 227 KiB of shared memory and 64 Ki registers (sm_90)."""
    rows = min(128, max(16, triton.next_power_of_2(group * longest)))
    if element_size > 2:
        # No tensor cores and twice the bytes: this is for exactness, not for speed.
        return Tiles(min(rows, 64), 32 if head_size > 64 else 64, 4, 1 if head_size > 128 else 2)
    if head_size > 256:
        return Tiles(min(rows, 64), 32, 8, 2)
    if head_size > 128:
        return Tiles(rows, 64, 8 if rows > 64 else 4, 2)
    return Tiles(rows, 64, 8 if rows > 64 else 4, 3)


def _splits(room: int, queries: Queries, layer: Layer) -> int:
    """As many as run at once, each with keys enough to be worth the merge.

    Args:
        room: programs that the device runs at once, eight warps to a processor, over programs
            without a split.
        queries: for the lengths.
        layer: for the window.
    """
    furthest = queries.furthest
    if layer.width:
        furthest = min(furthest, 2 * layer.width + queries.longest)
    wanted = min(room, furthest // MIN_SPLIT, MAX_SPLITS)
    return 1 << max(0, wanted.bit_length() - 1)


@dataclass(frozen=True)
class _Plan:
    """The launch of a batch.

    Attributes:
        requests: of the batch.
        rows: of a query tile: tokens times the heads that share a KV head.
        tiles_per_request: that the longest query needs.
        tiles: of all requests.
        search: a tile's request is not known by division, since lengths differ much: all
            requests' tiles lie one behind the other, and it is searched for.
        splits: programs that share a tile's keys.
    """

    requests: int
    rows: int
    tiles_per_request: int
    tiles: int
    search: bool
    splits: int

    @classmethod
    def make(
        cls, query: torch.Tensor, kv_heads: int, queries: Queries, layer: Layer, cut: Tiles
    ) -> _Plan:
        """For queries ``[tokens, heads, head size]``."""
        tokens, heads, _ = query.shape
        requests, group = len(queries.seq_lens), heads // kv_heads
        rows = max(cut.rows, 16, triton.next_power_of_2(group))
        in_tile = rows // group
        each = triton.cdiv(queries.longest, in_tile)
        tiles = min(requests * each, tokens // in_tile + requests)
        room = multiprocessors(query.device) * (8 // cut.warps) // (tiles * kv_heads)
        splits = cut.splits or _splits(room, queries, layer)
        return cls(requests, rows, each, tiles, tiles < requests * each, splits)


def _padded(head_size: int) -> int:
    return max(16, triton.next_power_of_2(head_size))


def _partial(query: torch.Tensor, splits: int) -> tuple[torch.Tensor | None, ...]:
    """What split programs hand to the merge; Nones without a split.

    Float32 ``[tokens, heads, splits, head size]``, weighted values; and ``[tokens, heads,
    splits]`` twice, the largest score and the sum of weights.
    """
    if splits == 1:
        return None, None, None
    shape = (*query.shape[:2], splits)
    return tuple(
        torch.empty(size, dtype=torch.float32, device=query.device)
        for size in ((*shape, query.shape[2]), shape, shape)
    )
