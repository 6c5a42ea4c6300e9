"""The attention kernel on a GPU: checks its results, then times it and the alternatives to it.

    python benchmarks/ops/attention.py [--json PATH] [--only llada2]

Needs torch and Triton only. Every shape is checked against the reference before it is timed; a
wrong kernel ends the run. Times are compared with the machine's own copy bandwidth and matrix rate,
and with what a user would have instead: FlexAttention and SDPA on contiguous keys and values;
vLLM's unified attention where vLLM can be imported (it is wrong for a canvas longer than its
window, which no shape of DiffusionGemma has); and, for prefills, the same kernel on virtual
sequences.

Without a GPU only ``--quick`` works, with TRITON_INTERPRET=1: it checks tiny shapes in Triton's
interpreter and times nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch._inductor.exc import InductorError

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.ops.machine import Machine, measure, require_gpu, time_ms, write_json
from tests.support.ops.attention import attention_reference
from vllm_dllm.ops.attention import masks
from vllm_dllm.ops.attention.inputs import AttentionLayer, PagedKV, QueryBatch
from vllm_dllm.ops.attention.launch_triton import paged_attention
from vllm_dllm.ops.attention.masks import WHOLE, MaskRule, QuerySpan, WindowRule

PAGE = 128
# Triton's interpreter multiplies no bfloat16.
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32


@dataclass(frozen=True)
class Shape:
    """A layer and a batch of equal requests.

    Attributes:
        name: as printed.
        heads, kv_heads, size: of the layer.
        rule, width: of every request's mask, and of the layer's window, 0 without one.
        context: cached tokens of a request.
        query: query tokens of a request.
        requests: of the batch.
    """

    name: str
    heads: int
    kv_heads: int
    size: int
    rule: MaskRule
    width: int
    context: int
    query: int
    requests: int

    @property
    def span(self) -> QuerySpan:
        return QuerySpan(self.context, self.context + self.query)

    def keys_seen(self) -> tuple[int, int]:
        """(query-key pairs, distinct keys) of one request."""
        q = torch.arange(*self.span)
        first, end = masks.interval(q, self.span, self.rule, self.width)
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
        rule=MaskRule(whole + shape.rule.block, whole + int(shape.rule.window)),
        max_query_len=shape.query,
        max_seq_len=shape.span.end,
    )
    query = torch.randn(
        (shape.requests * shape.query, shape.heads, shape.size),
        generator=generator,
        device=device,
        dtype=DTYPE,
    )
    return Batch(shape, query, store, queries, AttentionLayer(shape.size**-0.5, shape.width))


def shapes(quick: bool) -> list[Shape]:
    blocks, everything = MaskRule(32, WindowRule.NONE), MaskRule(WHOLE, WindowRule.NONE)
    windows = [MaskRule(WHOLE, rule) for rule in (WindowRule.SYMMETRIC, WindowRule.REFERENCE)]
    if quick:
        return [
            Shape("canvas", 4, 2, 32, blocks, 0, 96, 32, 2),
            Shape("prefill", 4, 2, 32, blocks, 0, 0, 160, 1),
            Shape("window", 4, 2, 32, windows[0], 48, 96, 32, 2),
            Shape("reference", 4, 2, 32, windows[1], 48, 96, 64, 2),
        ]
    chosen = []
    for context in (1024, 8192, 32768):
        for requests in (1, 16, 64):
            size = f"{context // 1024}k x{requests}"
            name = f"llada2 canvas {size}"
            chosen.append(Shape(name, 16, 4, 128, blocks, 0, context, 32, requests))
            for rule in windows:
                name = f"gemma window_{rule.window.name.lower()}(1024) {size}"
                chosen.append(Shape(name, 8, 4, 256, rule, 1024, context, 256, requests))
            name = f"gemma global {size}"
            chosen.append(Shape(name, 8, 2, 512, everything, 0, context, 256, requests))
    for prompt in (2048, 8192):
        name = f"llada2 prefill {prompt // 1024}k"
        chosen.append(Shape(name, 16, 4, 128, blocks, 0, 0, prompt, 1))
    return chosen


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
    block = shape.rule.block
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
        rule=MaskRule(torch.full_like(end, WHOLE), torch.zeros_like(end)),
        max_query_len=block,
    )
    return ours(batch, cut)


def sdpa(batch: Batch) -> Callable[[], Any]:
    """PyTorch's attention, with a dense mask where not all keys are seen."""
    shape = batch.shape
    query, keys, values = batch.contiguous()
    dense = masks.visible(shape.span, shape.rule, shape.width, query.device)
    mask = None if bool(dense.all()) else dense
    return lambda: torch.nn.functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, enable_gqa=True
    )


def flex(batch: Batch) -> Callable[[], Any]:
    """FlexAttention, compiled, with the rule's own intervals."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    shape = batch.shape
    query, keys, values = batch.contiguous()

    def sees(b: Any, h: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        first, end = masks.interval(q + shape.context, shape.span, shape.rule, shape.width)
        return (first <= k) & (k < end)

    torch._dynamo.reset()  # else it stops compiling after some shapes, and runs unfused
    blocks = create_block_mask(sees, None, None, shape.query, shape.span.end, device=query.device)
    run = torch.compile(flex_attention, dynamic=False) if query.is_cuda else flex_attention
    return lambda: run(query, keys, values, block_mask=blocks, enable_gqa=True)


def unified(batch: Batch) -> Callable[[], Any] | None:
    """Triton attention of vLLM with a causal flag per request, or None if it does not apply."""
    rule = batch.shape.rule
    if rule.block not in (1, WHOLE) and batch.shape.query > rule.block:
        return None
    if rule.window == WindowRule.REFERENCE:
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
    width = shape.width - 1
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
        except (torch.cuda.OutOfMemoryError, InductorError) as error:
            # FlexAttention's default tiles of wide heads do not fit into shared memory.
            print(f"{batch.shape.name}: {name} does not run: {str(error).splitlines()[0]}")
            continue
        if run is None or result is None:
            continue
        if result.dim() == 4:  # [requests, heads, tokens, head size]
            result = result.transpose(1, 2).flatten(0, 1)
        if not torch.allclose(result, expected, atol=0.05, rtol=0.05):
            raise SystemExit(f"{batch.shape.name}: {name} computes something else")
        alternatives[name] = run
    return alternatives


# Requests whose answers are checked, of those in a batch.
CHECKED = 2


def check(batch: Batch) -> float:
    """Root mean square error over that of eager PyTorch in `DTYPE`, against float64.

    At most 1 is right. In float32 it is 2, because only the order of the sums differs there.

    Raises:
        SystemExit: the kernel is wrong.
    """
    shape, queries = batch.shape, batch.queries
    out = torch.full_like(batch.query, torch.nan)
    paged_attention(batch.query, batch.kv, queries, batch.layer, out)
    worst = 0.0
    # The last requests have the largest offsets.
    for row in range(max(0, shape.requests - CHECKED), shape.requests):
        tokens = slice(row * shape.query, (row + 1) * shape.query)
        request = replace(
            queries,
            query_start=queries.query_start[:2],
            seq_lens=queries.seq_lens[row : row + 1],
            page_table=queries.page_table[row : row + 1],
        )
        # Only the first group's heads: the scores of a long prefill take much memory.
        group = shape.heads // shape.kv_heads
        kv = PagedKV(batch.kv.keys[:, :, :1], batch.kv.values[:, :, :1])
        arguments = (batch.query[tokens, :group], kv, request, batch.layer)
        truth = attention_reference(*arguments, torch.float64)
        budget = attention_reference(*arguments, DTYPE).double() - truth
        error = out[tokens, :group].double() - truth
        worst = max(worst, float(error.square().mean().sqrt() / budget.square().mean().sqrt()))
    limit = 2.0 if torch.float32 == DTYPE else 1.0
    if not worst <= limit or not out.isfinite().all():
        raise SystemExit(f"{shape.name}: WRONG, error {worst:.2f} of eager's; nothing is timed")
    return worst


def timed(batch: Batch, machine: Machine) -> dict[str, Any]:
    """Milliseconds of our kernel, its share of the machine's rates, and the others' ratios."""
    shape, ms = batch.shape, time_ms(ours(batch))
    return {
        "ms": ms,
        "bandwidth": shape.bytes() / ms * 1e3 / machine.copy_bytes_per_s,
        "matrix": shape.flops() / ms * 1e3 / machine.matrix_flops_per_s,
        **{name: time_ms(run) / ms for name, run in others(batch).items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--only", default="", help="shapes whose names begin so")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, checked but not timed")
    args = parser.parse_args()
    device = require_gpu(quick=args.quick)
    chosen = [shape for shape in shapes(args.quick) if shape.name.startswith(args.only)]
    if args.quick:
        for shape in chosen:
            batch = make_batch(shape, device)
            print(f"{shape.name:36} error {check(batch):.2f} of eager's; as {list(others(batch))}")
        return
    machine = measure()
    print(machine)
    print(f"{'':36} {'ms':>8} {'copy':>6} {'matrix':>6}   times as long: {', '.join(OTHERS)}")
    rows = {}
    for shape in chosen:
        batch = make_batch(shape, device)
        error = check(batch)
        row = rows[shape.name] = timed(batch, machine) | {"error": error}
        ratios = " ".join(f"{row[name]:8.2f}" if name in row else f"{'-':>8}" for name in OTHERS)
        numbers = f"{row['ms']:8.3f} {row['bandwidth']:6.0%} {row['matrix']:6.0%}"
        print(f"{shape.name:36} {numbers} {ratios}")
        del batch
        torch.cuda.empty_cache()
        if args.json:  # after each shape, so that an interrupted run leaves what it has
            write_json(args.json, machine, rows)


if __name__ == "__main__":
    main()
