"""Row statistics and the soft embedding on a GPU: checks the kernels, then times them.

    python benchmarks/ops/row_stats.py [--json PATH] [--only gemma] [--sweep]

Needs torch and Triton only. Every shape's answers are checked against float64 on some of its rows
before it is timed; a wrong kernel ends the run with code 1. Times are compared with the machine's
own copy bandwidth and matrix rate, and with what a user would have instead: whole rows of logits
in torch (eager and compiled), the tiles of torch operators that this package uses elsewhere, and
the product with the head alone. ``--sweep`` times other tiles of the first pass as well.

Without a GPU only ``--quick`` works, with TRITON_INTERPRET=1: it checks tiny shapes in Triton's
interpreter and times nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.ops.machine import Machine, measure, require_gpu, time_ms, write_json
from benchmarks.ops.row_stats_batch import Batch, Shape, shapes
from benchmarks.ops.row_stats_check import WrongKernelError, check
from benchmarks.ops.row_stats_others import others
from vllm_dllm.ops.statistics.head_triton import HeadTile


def timed(batch: Batch, machine: Machine) -> dict[str, Any]:
    """Milliseconds of our kernels, their share of the machine's rates, and the others' ratios."""
    shape = batch.shape
    ours = time_ms(batch.ours)
    row: dict[str, Any] = {
        "ms": ours,
        "first_pass_ms": time_ms(batch.first_pass),
        "bytes_per_s": shape.bytes(batch.hidden.element_size()) / ours * 1e3,
        "flops_per_s": shape.flops / ours * 1e3,
    }
    row["bandwidth"] = row["bytes_per_s"] / machine.copy_bytes_per_s
    row["matrix"] = row["flops_per_s"] / machine.matrix_flops_per_s
    for name, run in others(batch):
        try:
            row[name] = time_ms(run, repeats=9, warm_up=2) / ours
        except torch.cuda.OutOfMemoryError:
            row[name] = None
        torch.cuda.empty_cache()
    return row


def tiles(rows: int) -> Iterator[HeadTile]:
    """Other tiles that may suit a number of rows."""
    of_rows = [r for r in (16, 32, 64, 128) if r < 2 * rows]
    for r in of_rows[-2:]:
        for ids in (128, 256):
            for depth, stages in ((64, 3), (64, 4), (64, 5), (128, 3)):
                for warps in (4, 8):
                    if 2 * (r + ids) * depth * stages <= 220 << 10 and r * ids <= 4096 * warps:
                        yield HeadTile(r, ids, depth, warps, stages, 2 if warps == 4 else 1)


def sweep(batch: Batch) -> dict[str, float]:
    """Milliseconds of the first pass with other tiles, the fastest first."""
    times = {}
    for tile in tiles(batch.shape.rows):
        name = f"{tile.rows}x{tile.ids}x{tile.depth}, {tile.warps} warps, {tile.stages} stages"
        try:
            times[name] = time_ms(partial(batch.first_pass, tile), repeats=9, warm_up=2)
        except Exception as error:  # too much shared memory or a compiler's failure: go on
            print(f"    {name}: {type(error).__name__}")
    return dict(sorted(times.items(), key=lambda item: item[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--only", default="", help="shapes whose names begin so")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, checked but not timed")
    parser.add_argument("--sweep", action="store_true", help="time other tiles, too")
    args = parser.parse_args()
    device = require_gpu(quick=args.quick)
    chosen = [shape for shape in shapes(args.quick) if shape.name.startswith(args.only)]
    try:
        report(chosen, device, args)
    except WrongKernelError as wrong:
        sys.exit(f"A kernel is wrong, errors over their budgets: {wrong}")


def report(chosen: list[Shape], device: torch.device, args: argparse.Namespace) -> None:
    """Check and time, and print a line for each shape."""
    if args.quick:
        for shape in chosen:
            worst = max(check(Batch.make(shape, device)).values())
            print(f"{shape.name:24} worst error {worst:.2f} of its budget")
        return
    machine = measure()
    print(machine)
    heads = "eager", "compiled", "tiled", "product, rows", "product alone"
    print(f"{'':24}{'ms':>9}{'pass 1':>9}{'copy':>6}{'matrix':>7}   times as long: {heads}")
    rows: dict[str, Any] = {}
    for shape in chosen:
        batch = Batch.make(shape, device)
        errors = check(batch)
        row = rows[shape.name] = timed(batch, machine) | {"errors": errors}
        ratios = "".join(f"{row.get(h) or float('nan'):9.2f}" for h in heads)
        print(
            f"{shape.name:24}{row['ms']:9.3f}{row['first_pass_ms']:9.3f}"
            f"{row['bandwidth']:6.0%}{row['matrix']:7.0%}{ratios}"
        )
        if args.sweep:
            row["sweep"] = sweep(batch)
            for name, ms in list(row["sweep"].items())[:5]:
                print(f"    {ms:9.3f} ms  {name}")
        del batch
        torch.cuda.empty_cache()
        if args.json:  # after each shape, so that an interrupted run leaves what it has
            write_json(args.json, machine, rows)


if __name__ == "__main__":
    main()
