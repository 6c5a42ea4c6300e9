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
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.ops.attention_batch import DTYPE, Batch, make_batch, shapes
from benchmarks.ops.attention_others import OTHERS, others, ours
from benchmarks.ops.machine import Machine, measure, require_gpu, time_ms, write_json
from vllm_dllm.ops.attention.inputs import PagedKV
from vllm_dllm.ops.attention.launch_triton import paged_attention
from vllm_dllm.ops.attention.reference import attention_reference

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
        arguments = (batch.query[tokens, :group], kv, request, batch.layer, [shape.mask])
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
    if args.json:
        write_json(args.json, machine, rows)


if __name__ == "__main__":
    main()
