"""Row statistics and the soft embedding on a GPU: checks the kernels, then times them.

    python benchmarks/ops/row_stats.py [--json PATH] [--only gemma] [--sweep]

Needs torch and Triton only. Every shape's answers are checked against float64 on some of its rows
before it is timed; a wrong kernel ends the run with code 1. Times are compared with the machine's
own copy bandwidth and matrix rate, and with what a user would have instead: whole rows of logits
in torch (eager and compiled), and the product with the head alone. ``--sweep`` times other tiles of
a masked model's pass as well.

Without a GPU only ``--quick`` works, with TRITON_INTERPRET=1: it checks tiny shapes in Triton's
interpreter and times nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._inductor.exc import InductorError

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.ops.machine import Machine, measure, require_gpu, time_ms, write_json
from vllm_dllm.ops.noise.keyed import row_keys
from vllm_dllm.ops.statistics.filters_triton import read_with
from vllm_dllm.ops.statistics.head import Head
from vllm_dllm.ops.statistics.partials import SoftmaxPartials
from vllm_dllm.ops.statistics.row_changes import RowChanges
from vllm_dllm.ops.statistics.rows import RowStatistics, row_statistics
from vllm_dllm.ops.statistics.rows_triton import Tile, head_statistics, logits_statistics
from vllm_dllm.ops.statistics.sampled import draw
from vllm_dllm.ops.statistics.scores_triton import LogitRows
from vllm_dllm.ops.statistics.soft_embedding_triton import soft_embedding


@dataclass(frozen=True)
class Shape:
    """A model's head and a batch of equal requests.

    Attributes:
        model: as printed.
        hidden, vocabulary, canvas: of the model.
        requests: of the batch.
        soft: whether its rows are sampled and have a soft embedding; else they are greedy, and
            id 0 is the mask, which is never chosen.
        cap: the final soft cap, or None.
    """

    model: str
    hidden: int
    vocabulary: int
    canvas: int
    requests: int
    soft: bool = False
    cap: float | None = None

    @property
    def name(self) -> str:
        return f"{self.model} {self.requests:2} requests"

    @property
    def rows(self) -> int:
        return self.canvas * self.requests

    @property
    def flops(self) -> int:
        """Of the matrix products: one with the head, and two more for the soft embedding."""
        return 2 * self.rows * self.vocabulary * self.hidden * (3 if self.soft else 1)

    def bytes(self, size: int) -> int:
        """The least that must be read: each weight once for each product."""
        return self.vocabulary * self.hidden * size * (3 if self.soft else 1)


def shapes(quick: bool) -> Iterator[Shape]:
    """Of LLaDA2.0-mini and DiffusionGemma, or tiny ones."""
    if quick:
        yield Shape("tiny masked", 48, 1000, 8, 3)
        yield Shape("tiny uniform", 64, 777, 16, 2, soft=True, cap=30.0)
        return
    for requests in (1, 16, 64):
        yield Shape("llada2-mini", 2048, 157_184, 32, requests)
    for requests in (1, 4, 16):
        yield Shape("gemma", 2816, 262_144, 256, requests, soft=True, cap=30.0)


@dataclass(frozen=True)
class Batch:
    """Random hidden states of a shape, its head, temperatures and keys."""

    shape: Shape
    hidden: torch.Tensor
    head: Head
    temperature: torch.Tensor
    keys: torch.Tensor

    @classmethod
    def make(cls, shape: Shape, device: torch.device) -> Batch:
        # The interpreter multiplies bfloat16 as if it were integers.
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        torch.manual_seed(0)
        random = partial(torch.randn, device=device, dtype=dtype)
        hidden = random(shape.rows, shape.hidden)
        # Logits that spread by 5: a few dozens of tokens have most of the mass.
        weight = random(shape.vocabulary, shape.hidden) * (5 / shape.hidden**0.5)
        embedding = random(shape.vocabulary, shape.hidden) if shape.soft else None
        temperature = torch.full((shape.rows,), 0.6, device=device)
        temperature[::7] = 0
        keys = row_keys(torch.arange(shape.rows, device=device), 1)

        def logits(hidden: torch.Tensor) -> torch.Tensor:
            return capped((hidden @ weight.T).float(), shape.cap)

        head = Head(logits, shape.vocabulary, embedding, None, weight, shape.cap)
        return cls(shape, hidden, head, temperature, keys)

    def ours(self) -> tuple[RowStatistics, torch.Tensor | None]:
        """The statistics as the engine would compute them."""
        if not self.shape.soft:
            return self.first_pass(), None
        rows = self.rows()
        partials = logits_statistics(rows, None, self.temperature, self.keys)
        soft = soft_embedding(rows, self.head, self.temperature, partials)
        return partials.sampled_statistics(self.temperature == 0), soft

    def rows(self) -> LogitRows:
        """The rows of logits in memory."""
        return LogitRows(self.head.products(self.hidden), self.shape.canvas, self.shape.cap)

    def with_options(self) -> SoftmaxPartials:
        """Biases, penalties, filters and a draw for every row, from logits in memory."""
        shape, device = self.shape, self.hidden.device
        count = shape.requests
        index = torch.zeros((count, 4), dtype=torch.int32)
        changes = RowChanges(
            index,
            index.to(device),
            torch.zeros((1, shape.vocabulary), device=device),
            torch.zeros((1, shape.vocabulary), dtype=torch.bool, device=device),
            torch.ones((1, shape.canvas), dtype=torch.bool, device=device),
            torch.ones((1, 2, shape.vocabulary), dtype=torch.int32, device=device),
            torch.ones((1, 3), device=device),
        )
        ones = torch.ones(count, device=device)
        filters = ones * 0.001, ones.long() * 50, ones * 0.9
        rows = read_with(self.rows(), changes, filters, self.temperature)
        return logits_statistics(rows, None, self.temperature, self.keys)

    def first_pass(self, tile: Tile | None = None) -> RowStatistics:
        """Statistics without the soft embedding."""
        if self.shape.soft:
            partials = logits_statistics(self.rows(), None, self.temperature, self.keys)
            return partials.sampled_statistics(self.temperature == 0)
        partials = head_statistics(self.hidden, self.head, forbidden=0, tile=tile)
        return partials.greedy_statistics(entropy=True)


def capped(logits: torch.Tensor, cap: float | None) -> torch.Tensor:
    return logits if cap is None else (logits / cap).tanh() * cap


def whole_rows(
    hidden: torch.Tensor, head: Head, temperature: torch.Tensor, keys: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The same results from whole rows of logits, in plain torch operators."""
    logits = (hidden @ head.weight.T).float()
    if head.embedding is None:
        statistics = row_statistics(logits, 0, entropy=True)
        return statistics.token, statistics.probability, statistics.entropy
    greedy = (temperature == 0)[:, None]
    scaled = capped(logits, head.soft_cap) / torch.where(greedy, 1.0, temperature[:, None])
    token = scaled.argmax(-1)
    p = scaled.softmax(-1)
    entropy = -torch.xlogy(p, p).sum(-1)
    sample = torch.where(greedy[:, 0], token, draw(scaled, keys))
    picked = p.gather(1, torch.stack([token, sample], 1))
    soft = p.to(head.embedding.dtype) @ head.embedding
    return token, sample, picked, entropy, torch.where(greedy, head.embedding[token], soft)


def others(batch: Batch) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The alternatives by name; of the last two, one is more work, and one a part of it."""
    arguments = batch.hidden, batch.head, batch.temperature, batch.keys
    yield "eager", lambda: whole_rows(*arguments)
    compiled = torch.compile(whole_rows, dynamic=False)
    yield "compiled", lambda: compiled(*arguments)
    weight = batch.head.weight
    if not batch.shape.soft:
        yield "product, rows", lambda: logits_statistics(batch.rows(), 0)
    yield "options", batch.with_options
    yield "product alone", lambda: batch.hidden @ weight.T


# Rows of a shape that are checked.
CHECKED = 24


class WrongKernelError(Exception):
    """A kernel's answer is too far from float64."""


def check(batch: Batch) -> dict[str, float]:
    """Errors on some rows, as multiples of their budgets.

    The truth is in float64. A budget is three times the error of eager PyTorch, whose logits are
    rounded to the head's dtype as the model's own, and whose soft embedding has probabilities in
    the embedding's dtype.

    Raises:
        WrongKernelError: an error is more than 1.
    """
    shape, device = batch.shape, batch.hidden.device
    statistics, soft = batch.ours()
    rows = torch.linspace(0, shape.rows - 1, min(CHECKED, shape.rows), device=device).long()
    statistics = statistics.take(rows)
    weight, hidden = batch.head.weight, batch.hidden[rows]
    exact = capped(hidden.double() @ weight.double().T, shape.cap)
    eager = capped((hidden @ weight.T).float(), shape.cap)
    greedy = batch.temperature[rows] == 0 if shape.soft else torch.zeros_like(rows).bool()
    errors: dict[str, float] = {}

    def compare(name: str, value: torch.Tensor, true: torch.Tensor, rough: torch.Tensor) -> None:
        budget = 3 * (rough.double() - true).abs().max() + 2e-5
        errors[name] = float((value.double() - true).abs().max() / budget)

    if shape.soft:
        divisor = torch.where(greedy, 1.0, batch.temperature[rows])[:, None]
        exact, eager = exact / divisor.double(), eager / divisor
        drawn = draw(eager, batch.keys[rows])
        different = (drawn != statistics.sample) & ~greedy
        # Two scores within rounding are rare, two such rows of a few dozens all but impossible.
        errors["sample"] = float(different.sum()) / 2
    p, rough = exact.softmax(-1), eager.softmax(-1)
    allowed = exact.clone()
    if not shape.soft:
        allowed[:, 0] = -torch.inf
    best = allowed.max(-1).values
    # Two logits that round to the same one tie, and the lowest id wins.
    near = 1e-4 + 3 * (eager.double() - exact).abs().amax(-1)
    errors["token"] = float(
        ((best - allowed.gather(1, statistics.token[:, None])[:, 0]) / near).max()
    )
    sure = ~greedy
    top = [t.gather(1, statistics.token[:, None])[sure, 0] for t in (p, rough)]
    compare("probability", statistics.probability[sure], *top)
    compare(
        "entropy", statistics.entropy[sure], *(-torch.xlogy(t, t).sum(-1)[sure] for t in (p, rough))
    )
    if soft is not None:
        table = batch.head.embedding
        rounded = rough.to(table.dtype).float() @ table.float()
        certain = greedy[:, None]
        compare(
            "soft",
            soft[rows],
            torch.where(certain, table[statistics.token].double(), p @ table.double()),
            torch.where(certain, table[statistics.token].float(), rounded),
        )
    wrong = {name: error for name, error in errors.items() if not error <= 1}
    if wrong:
        raise WrongKernelError(f"{shape.name}: {wrong}")
    return errors


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
        except (torch.cuda.OutOfMemoryError, InductorError) as error:
            print(f"{shape.name}: {name} does not run: {str(error).splitlines()[0]}")
            row[name] = None
        torch.cuda.empty_cache()
    return row


def tiles(rows: int) -> Iterator[Tile]:
    """Other tiles that may suit a number of rows."""
    of_rows = [r for r in (16, 32, 64, 128) if r < 2 * rows]
    for r in of_rows[-2:]:
        for ids in (128, 256):
            for depth, stages in ((64, 3), (64, 4), (64, 5), (128, 3)):
                for warps in (4, 8):
                    if 2 * (r + ids) * depth * stages <= 220 << 10 and r * ids <= 4096 * warps:
                        yield Tile(r, ids, depth, warps, stages, 2 if warps == 4 else 1)


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
    heads = "eager", "compiled", "product, rows", "options", "product alone"
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
        if args.sweep and not shape.soft:
            row["sweep"] = sweep(batch)
            for name, ms in list(row["sweep"].items())[:5]:
                print(f"    {ms:9.3f} ms  {name}")
        del batch
        torch.cuda.empty_cache()
        if args.json:  # after each shape, so that an interrupted run leaves what it has
            write_json(args.json, machine, rows)


if __name__ == "__main__":
    main()
