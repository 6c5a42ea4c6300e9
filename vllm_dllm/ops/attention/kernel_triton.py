"""Paged attention with a mask rule for each request: the Triton kernels that `launch_triton` runs.

Every mask of `masks` lets a query see one interval of keys, and both edges of the interval grow
with the query. A tile of queries therefore meets three runs of key tiles: tiles that only some of
its queries see (masked), tiles that all of them see (no mask arithmetic), and masked tiles again.
All other tiles are never read. The softmax is computed online (Milakov and Gimelshein, 2018), in
powers of two.
"""
# A kernel's arguments have the types of the values it is launched with, which mypy cannot express.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False
# mypy: disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from vllm_dllm.ops.attention.masks import WindowRule

LOG2_E = tl.constexpr(1.4426950408889634)
_NONE = tl.constexpr(int(WindowRule.NONE))
_SYMMETRIC = tl.constexpr(int(WindowRule.SYMMETRIC))


@triton.jit
def _find_request(query_start, tile, requests, BLOCK_Q: tl.constexpr):
    """The request that query tile ``tile`` belongs to: the last one that begins at or before it.

    The tiles of request r are numbered from ``query_start[r] // BLOCK_Q + r`` on.
    """
    low = 0
    high = requests
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start + middle) // BLOCK_Q + middle <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _visible_keys(q, start, end, block, window, width, WINDOWED: tl.constexpr):
    """The keys ``first <= k < last`` that queries ``q`` see, as `masks.interval` computes them."""
    first = q * 0
    last = tl.minimum((q // block + 1) * block, end)
    if WINDOWED:
        left = tl.where(window == _SYMMETRIC, q - width + 1, start - width + 1)
        first = tl.where(window == _NONE, first, tl.maximum(left, 0))
        last = tl.where(window == _SYMMETRIC, tl.minimum(last, q + width), last)
    return first, last


@triton.jit
def _key_tiles(
    low, high, start, end, block, window, width, split, splits,
    KEYS: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """A split's key tiles for queries from ``low`` to ``high``, inclusive.

    Tiles ``begin..whole_begin`` are masked, ``whole_begin..whole_end`` are seen by all queries, and
    ``whole_end..stop`` are masked again. Edges grow with the query, so those of the first and the
    last query bound all others.
    """
    outer_first, inner_last = _visible_keys(low, start, end, block, window, width, WINDOWED)
    inner_first, outer_last = _visible_keys(high, start, end, block, window, width, WINDOWED)
    tile_first = outer_first // KEYS
    tile_end = tl.maximum(tl.cdiv(outer_last, KEYS), tile_first)
    per_split = tl.cdiv(tile_end - tile_first, splits)
    begin = tl.minimum(tile_first + split * per_split, tile_end)
    stop = tl.minimum(begin + per_split, tile_end)
    whole_begin = tl.minimum(tl.maximum(tl.cdiv(inner_first, KEYS), begin), stop)
    whole_end = tl.minimum(tl.maximum(inner_last // KEYS, whole_begin), stop)
    return begin, whole_begin, whole_end, stop


@triton.jit
def _page_offsets(
    table_row, tile, end, page_stride, slot_stride,
    PAGE: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Offsets of a tile's keys in the pages, int64 ``[KEYS]``."""
    k = tile * KEYS + tl.arange(0, KEYS)
    if PAGE % KEYS == 0:
        # A tile lies inside one page.
        page = tl.load(table_row + tile * KEYS // PAGE).to(tl.int64)
        slot = tile * KEYS % PAGE + tl.arange(0, KEYS)
        return page * page_stride + slot.to(tl.int64) * slot_stride
    if MASKED:
        page = tl.load(table_row + k // PAGE, mask=k < end, other=0)
    else:
        page = tl.load(table_row + k // PAGE)
    return page.to(tl.int64) * page_stride + (k % PAGE).to(tl.int64) * slot_stride


@triton.jit
def _fold_key_tile(
    acc, best, total, queries, keys, values, table_row, tile, first, last, end, factor, soft_cap,
    page_stride, slot_stride,
    HEAD: tl.constexpr, HEAD_PADDED: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr,
    CAPPED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Fold one tile of keys into the running softmax of a tile of queries."""
    k = tile * KEYS + tl.arange(0, KEYS)
    d = tl.arange(0, HEAD_PADDED)
    offsets = _page_offsets(table_row, tile, end, page_stride, slot_stride, PAGE, KEYS, MASKED)
    # Slots after a sequence's end may hold NaN, and 0 * NaN is NaN.
    key_mask = (d < HEAD)[:, None] & (k < end)[None, :]
    value_mask = (k < end)[:, None] & (d < HEAD)[None, :]
    if MASKED:
        key = tl.load(keys + offsets[None, :] + d[:, None], mask=key_mask, other=0.0)
        value = tl.load(values + offsets[:, None] + d[None, :], mask=value_mask, other=0.0)
    elif HEAD == HEAD_PADDED:
        key = tl.load(keys + offsets[None, :] + d[:, None])
        value = tl.load(values + offsets[:, None] + d[None, :])
    else:
        key = tl.load(keys + offsets[None, :] + d[:, None], mask=(d < HEAD)[:, None], other=0.0)
        value = tl.load(values + offsets[:, None] + d[None, :], mask=(d < HEAD)[None, :], other=0.0)
    scores = tl.dot(queries, key.to(queries.dtype), input_precision="ieee")
    if CAPPED:
        # tanh(x) = 2 sigmoid(2x) - 1, for any x.
        scores = soft_cap * (2.0 * tl.sigmoid(scores * (2.0 * factor / soft_cap)) - 1.0) * LOG2_E
    else:
        scores = scores * (factor * LOG2_E)
    if MASKED:
        visible = (k[None, :] >= first[:, None]) & (k[None, :] < last[:, None])
        scores = tl.where(visible, scores, -float("inf"))
    grown = tl.maximum(best, tl.max(scores, 1))
    origin = grown
    if MASKED:
        # A row that has seen no key yet has no largest score to subtract.
        origin = tl.where(grown == -float("inf"), 0.0, grown)
    weights = tl.exp2(scores - origin[:, None])
    shrink = tl.exp2(best - origin)
    total = total * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None]
    acc = tl.dot(weights.to(queries.dtype), value.to(queries.dtype), acc, input_precision="ieee")
    return acc, grown, total


@triton.jit
def _normalise(acc, best, total, head, sinks, value_scale, mask):
    """Divide sums of weighted values by sums of weights: `acc` ``[n, d]``, the others ``[n]``."""
    if sinks is not None:
        sink = tl.load(sinks + head, mask=mask, other=0.0).to(tl.float32) * LOG2_E
        grown = tl.maximum(best, sink)
        shrink = tl.exp2(best - grown)
        acc = acc * shrink[:, None]
        total = total * shrink + tl.exp2(sink - grown)
    # A query that sees no key gives zeros.
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if value_scale is not None:
        acc = acc * tl.load(value_scale)
    return acc


@triton.jit
def attention_kernel(
    out, partial_acc, partial_best, partial_total, query, keys, values, key_scale, value_scale,
    sinks, table, query_start, seq_lens, rule_block, rule_window, scale, soft_cap, width, requests,
    tiles_per_request, splits, out_token_stride, out_head_stride, query_token_stride,
    query_head_stride, page_stride, slot_stride, kv_head_stride, table_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD: tl.constexpr, HEAD_PADDED: tl.constexpr,
    PAGE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SEARCH: tl.constexpr,
    SPLIT: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """A tile of queries of one request and KV head, and one split of its keys.

    The grid is (query tiles, KV heads, splits).
    """
    BLOCK_Q: tl.constexpr = ROWS // GROUP
    # The last tiles of a causal query see the most keys, so they are started first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    if SEARCH:
        request = _find_request(query_start, tile, requests, BLOCK_Q)
        offset = (tile - tl.load(query_start + request) // BLOCK_Q - request) * BLOCK_Q
    else:
        request = tile // tiles_per_request
        offset = tile % tiles_per_request * BLOCK_Q
    first_token = tl.load(query_start + request)
    tokens = tl.load(query_start + request + 1) - first_token
    if offset >= tokens:
        return
    end = tl.load(seq_lens + request)
    start = end - tokens
    block = tl.load(rule_block + request)
    window = tl.load(rule_window + request)

    row = tl.arange(0, ROWS)
    d = tl.arange(0, HEAD_PADDED)
    token = offset + row // GROUP
    head = kv_head * GROUP + row % GROUP
    real = (token < tokens) & (row < BLOCK_Q * GROUP)
    batch_token = (first_token + token).to(tl.int64)
    row_mask = real[:, None] & (d < HEAD)[None, :]
    at_query = batch_token * query_token_stride + head * query_head_stride
    q = tl.load(query + at_query[:, None] + d[None, :], mask=row_mask, other=0.0)

    first, last = _visible_keys(start + token, start, end, block, window, width, WINDOWED)
    low, high = start + offset, start + tl.minimum(offset + BLOCK_Q, tokens) - 1
    begin, whole_begin, whole_end, stop = _key_tiles(
        low, high, start, end, block, window, width, split, splits, KEYS, WINDOWED
    )

    best = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD_PADDED], tl.float32)
    factor = scale
    if key_scale is not None:
        factor = scale * tl.load(key_scale)
    table_row = table + request.to(tl.int64) * table_stride
    keys += kv_head.to(tl.int64) * kv_head_stride
    values += kv_head.to(tl.int64) * kv_head_stride
    left = whole_begin - begin
    for masked in tl.static_range(2):
        count = left + stop - whole_end if masked else whole_end - whole_begin
        for i in range(0, count):
            n = whole_begin + i
            if masked:
                n = tl.where(i < left, begin + i, whole_end + i - left)
            acc, best, total = _fold_key_tile(
                acc, best, total, q, keys, values, table_row, n, first, last, end, factor,
                soft_cap, page_stride, slot_stride, HEAD, HEAD_PADDED, PAGE, KEYS, CAPPED, masked,
            )  # fmt: skip

    if SPLIT:
        at_part = (batch_token * HEADS + head) * splits + split
        tl.store(partial_acc + at_part[:, None] * HEAD + d[None, :], acc, mask=row_mask)
        tl.store(partial_best + at_part, best, mask=real)
        tl.store(partial_total + at_part, total, mask=real)
    else:
        acc = _normalise(acc, best, total, head, sinks, value_scale, real)
        at_out = batch_token * out_token_stride + head * out_head_stride
        tl.store(out + at_out[:, None] + d[None, :], acc.to(out.dtype.element_ty), mask=row_mask)


@triton.jit
def merge_kernel(
    out, partial_acc, partial_best, partial_total, value_scale, sinks, query_start, requests,
    out_token_stride, out_head_stride,
    HEADS: tl.constexpr, HEAD: tl.constexpr, HEAD_PADDED: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Merge the splits' results of one head of one token, each weighted by its share of the sum.

    The grid is (tokens, heads).
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    if token >= tl.load(query_start + requests):
        return
    split = tl.arange(0, SPLITS)
    d = tl.arange(0, HEAD_PADDED)
    at_part = (token * HEADS + head) * SPLITS + split
    best = tl.load(partial_best + at_part)
    total = tl.load(partial_total + at_part)
    origin = tl.max(best, 0)
    origin = tl.where(origin == -float("inf"), 0.0, origin)
    share = tl.exp2(best - origin)
    mask = (d < HEAD)[None, :] & (total > 0.0)[:, None]
    acc = tl.load(partial_acc + at_part[:, None] * HEAD + d[None, :], mask=mask, other=0.0)
    # `_normalise` takes rows; this program has one.
    unit = tl.zeros([1], tl.int32)
    acc = _normalise(
        tl.sum(acc * share[:, None], 0)[None, :],
        origin + unit,
        tl.sum(total * share, 0) + unit,
        head + unit,
        sinks,
        value_scale,
        unit == 0,
    )
    at_out = token * out_token_stride + head * out_head_stride + d
    tl.store(out + at_out[None, :], acc.to(out.dtype.element_ty), mask=(d < HEAD)[None, :])
