"""Our attention kernel and what a user would have instead of it, as functions to be timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from benchmarks.ops.attention_batch import Batch
from vllm_dllm.ops.attention import masks
from vllm_dllm.ops.attention.inputs import QueryBatch
from vllm_dllm.ops.attention.launch_triton import paged_attention
from vllm_dllm.ops.attention.masks import MaskRule


def ours(batch: Batch, queries: QueryBatch | None = None) -> Callable[[], torch.Tensor]:
    """Our kernel, on the batch's requests or on others over the same tokens."""
    out = torch.empty_like(batch.query)

    def run() -> torch.Tensor:
        paged_attention(batch.query, batch.kv, queries or batch.queries, batch.layer, out)
        return out

    return run


def virtual_sequences(batch: Batch) -> Callable[[], torch.Tensor] | None:
    """The same prefill as one non-causal sequence for each block, on the same kernel."""
    shape, queries = batch.shape, batch.queries
    block = shape.mask.rule.block
    if shape.context or shape.query <= block:
        return None
    count = shape.query // block
    device = batch.query.device
    end = torch.arange(1, count + 1, dtype=torch.int32, device=device) * block
    cut = replace(
        queries,
        query_start=torch.arange(count + 1, dtype=torch.int32, device=device) * block,
        seq_lens=end + shape.context,
        page_table=queries.page_table.expand(count, -1).contiguous(),
        rule=MaskRule(torch.full_like(end, masks.WHOLE), torch.zeros_like(end)),
        max_query_len=block,
    )
    return ours(batch, cut)


def sdpa(batch: Batch) -> Callable[[], Any]:
    """PyTorch's attention, with a dense mask where not all keys are seen."""
    shape = batch.shape
    query, keys, values = batch.contiguous()
    dense = shape.mask.dense(shape.span, query.device)
    mask = None if bool(dense.all()) else dense
    return lambda: torch.nn.functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, enable_gqa=True
    )


def flex(batch: Batch) -> Callable[[], Any]:
    """FlexAttention, compiled, with the mask's own predicate."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    shape = batch.shape
    query, keys, values = batch.contiguous()

    def sees(b: Any, h: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return shape.mask.sees(q + shape.context, k, shape.span)

    blocks = create_block_mask(sees, None, None, shape.query, shape.span.end, device=query.device)
    run = torch.compile(flex_attention, dynamic=False) if query.is_cuda else flex_attention
    return lambda: run(query, keys, values, block_mask=blocks, enable_gqa=True)


def unified(batch: Batch) -> Callable[[], Any] | None:
    """Triton attention of vLLM with a causal flag per request, or None if it does not apply."""
    rule = batch.shape.mask.rule
    if rule.block not in (1, masks.WHOLE) and batch.shape.query > rule.block:
        return None
    if rule.window == masks.WindowRule.REFERENCE:
        return None
    try:
        from vllm.triton_utils import HAS_TRITON
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention
    except ImportError:
        return None
    if not HAS_TRITON:
        return None
    queries, shape = batch.queries, batch.shape
    out, unit = torch.empty_like(batch.query), torch.ones(1, device=batch.query.device)
    width = shape.mask.window_width - 1
    descale = unit.expand(shape.requests, shape.kv_heads)
    # Room for its own split of keys, as vLLM's metadata builder makes it.
    rows, parts = 128 // shape.kv_heads, 16
    room = (rows, shape.heads, parts)
    scratch = [torch.empty(s, device=out.device) for s in ((*room, shape.size), room, room)]
    keywords = {
        "q": batch.query,
        "k": batch.kv.keys,
        "v": batch.kv.values,
        "out": out,
        "cu_seqlens_q": queries.query_start,
        "max_seqlen_q": queries.max_query_len,
        "seqused_k": queries.seq_lens,
        "max_seqlen_k": queries.max_seq_len,
        "softmax_scale": batch.layer.scale,
        "causal": torch.zeros(shape.requests, dtype=torch.int32, device=out.device),
        "window_size": (width, width),
        "block_table": queries.page_table,
        "softcap": 0,
        "q_descale": None,
        "k_descale": descale,
        "v_descale": descale,
        "seq_threshold_3D": rows,
        "num_par_softmax_segments": parts,
        "softmax_segm_output": scratch[0],
        "softmax_segm_max": scratch[1],
        "softmax_segm_expsum": scratch[2],
    }

    def run() -> torch.Tensor:
        unified_attention(**keywords)
        return out

    return run


# An alternative that may return None does not apply to every shape.
OTHERS: dict[str, Callable[[Batch], Callable[[], torch.Tensor] | None]] = {
    "flex": flex,
    "sdpa": sdpa,
    "vllm": unified,
    "virtual": virtual_sequences,
}


def others(batch: Batch) -> dict[str, Callable[[], torch.Tensor]]:
    """The alternatives to our kernel for a shape; each must compute the same result.

    Raises:
        SystemExit: one computes something else.
    """
    alternatives, expected = {}, ours(batch)()
    for name, prepare in OTHERS.items():
        try:
            run = prepare(batch)
            result = None if run is None else run()
        except torch.cuda.OutOfMemoryError:
            print(f"{batch.shape.name}: {name} runs out of memory")
            continue
        if run is None or result is None:
            continue
        if result.dim() == 4:  # [requests, heads, tokens, head size]
            result = result.transpose(1, 2).flatten(0, 1)
        if not torch.allclose(result, expected, atol=0.05, rtol=0.05):
            raise SystemExit(f"{batch.shape.name}: {name} computes something else")
        alternatives[name] = run
    return alternatives
