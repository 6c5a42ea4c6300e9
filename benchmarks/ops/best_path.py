"""The paths of a constrained step: checks the kernels, then times them.

    python benchmarks/ops/best_path.py [--json PATH] [--only llada2]

Needs torch, numba and `canvas_grammar`, and Triton on a GPU. Random logits of a model's size are
read and followed under a record with strings and numbers, and under a schema for any JSON, whose
automaton is as large as they get. All positions are free, which is the most work. Before anything
is timed, paths are compared with those of the form for CPUs; best paths must be equal, and drawn
ones may differ where two scores tie within rounding.

On a GPU the times are those of reading the logits and of all that follows, without one those of
the form for CPUs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
GRAMMAR = ROOT / "packages" / "canvas-grammar"
sys.path[:0] = [str(ROOT), str(GRAMMAR)]

from canvas_grammar import CompileLimits, Constraint, Vocabulary  # noqa: E402
from canvas_grammar.automaton.compilation import compile_constraint  # noqa: E402
from canvas_grammar.automaton.configurations import START  # noqa: E402
from canvas_grammar.automaton.tables import (  # noqa: E402
    Column,
    Tables,
    automaton_tables,
    class_tables,
)
from canvas_grammar.automaton.windows import window  # noqa: E402
from canvas_grammar.decoding.best_path import (  # noqa: E402
    CanvasWindow,
    ConstrainedPath,
    FreeTokens,
)
from canvas_grammar.decoding.path_finder import (  # noqa: E402
    PathStep,
    PlannedCanvas,
    path_finder,
)

from vllm_dllm.ops.noise.keyed import gumbel, row_keys  # noqa: E402

RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "role": {"enum": ["admin", "user", None]},
    },
    "required": ["name", "age", "role"],
}
SCHEMAS: dict[str, Any] = {"record": RECORD, "any JSON": {}}


@dataclass(frozen=True)
class Shape:
    """A model's canvases and what they follow."""

    model: str
    ids: int
    length: int
    dtype: torch.dtype
    schema: str
    requests: int
    draws: bool

    @property
    def name(self) -> str:
        kind = "drawn" if self.draws else "best"
        return f"{self.model} {self.requests:2} {self.schema}, {kind}"


def shapes(quick: bool) -> Iterator[Shape]:
    """Of LLaDA2.0-mini and DiffusionGemma, or tiny ones."""
    models = [("llada2", 157_184, 32, torch.bfloat16), ("gemma", 262_144, 256, torch.float32)]
    if quick:
        models = [("tiny", 3000, 8, torch.float32)]
    for model in models:
        for schema in SCHEMAS:
            for requests in (2,) if quick else (1, 4, 16):
                for draws in (False, True):
                    yield Shape(*model, schema, requests, draws)


@cache
def tables(ids: int, length: int, schema: str) -> tuple[Tables, Tables]:
    """Tables of the automaton's first part, and of its classes, on the host."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(2, 9, size=ids - 257)
    letters = np.frombuffer(b'abcdefghijklmnopqrstuvwxyz ABC,.0":{}[]', np.uint8)
    pieces = np.split(rng.choice(letters, sizes.sum()), sizes.cumsum()[:-1])
    words = [b"", *(bytes([byte]) for byte in range(256)), *(piece.tobytes() for piece in pieces)]
    limits = CompileLimits()
    asked = Constraint.from_value("json_schema", SCHEMAS[schema])
    found = compile_constraint(asked, Vocabulary.from_tokens(words, [0]), limits)
    part = window(found.configurations(), START, length, limits.window_states).automaton
    return automaton_tables(part), class_tables(part.class_of_token, part.classes)


@dataclass(frozen=True)
class Batch:
    """Random logits of a shape, and a step of it on their device."""

    shape: Shape
    logits: torch.Tensor
    window: CanvasWindow
    free: FreeTokens

    @classmethod
    def make(cls, shape: Shape, device: torch.device) -> Batch:
        count, length = shape.requests, shape.length
        generator = torch.Generator(device).manual_seed(0)
        # The canvases of a batch share their logits' memory where those of all would not fit.
        one = torch.randn(1, length, shape.ids, generator=generator, device=device) * 4
        logits = one.to(shape.dtype).expand(count, -1, -1)
        several = torch.ones(count, dtype=torch.int64, device=device)
        forced = torch.full((count, length), -1, device=device)
        windows = CanvasWindow(0 * several, 0 * several, 4096 * several, length * several, forced)
        keys = row_keys(torch.arange(count)[:, None], torch.arange(length)).to(device)
        rows = one[0].float()
        drawn = [
            (row + gumbel(key[None], torch.arange(shape.ids, device=device))[0]).argmax()
            for row, key in zip(rows, keys[0], strict=True)
        ]
        share = (rows.amax(-1) - rows.logsumexp(-1)).exp().expand(count, -1)
        tokens = rows.argmax(-1).expand(count, -1), torch.stack(drawn).expand(count, -1)
        return cls(shape, logits, windows, FreeTokens(*tokens, share, keys))

    def on(self, device: torch.device) -> Batch:
        def moved(of: Any) -> Any:
            parts = {k: v if v is None else v.to(device) for k, v in vars(of).items()}
            return type(of)(**parts)

        return Batch(self.shape, self.logits.to(device), moved(self.window), moved(self.free))

    def step(self) -> tuple[PathStep, Callable[[], None], Callable[[], None]]:
        """A step, and its two calls."""
        shape, device = self.shape, self.logits.device
        finder = path_finder(device)
        own = [found.on(device) for found in tables(shape.ids, shape.length, shape.schema)]
        canvases = [
            PlannedCanvas(n, own[0], own[1], not shape.draws, shape.draws)
            for n in range(shape.requests)
        ]
        path = ConstrainedPath.empty(self.window)
        step = PathStep(finder.plan(canvases), self.window, self.free, path)
        every = range(shape.requests)
        return step, lambda: finder.read(step, every, self.logits), lambda: finder.follow(step)


def check(batch: Batch) -> float:
    """The share of a drawn path's tokens that differ from those of the form for CPUs.

    Two devices round the logarithms of the noise differently, which may decide between two tokens.

    Raises:
        SystemExit: a best path differs, or more than a hundredth of the drawn ones and one token.
    """
    paths = []
    for one in (batch, batch.on(torch.device("cpu"))):
        step, read, follow = one.step()
        read()
        follow()
        paths.append(step.path)
    differs = paths[0].token.cpu() != paths[1].token
    if differs.sum() > (max(1, differs.numel() // 100) if batch.shape.draws else 0):
        sys.exit(f"A kernel is wrong: {batch.shape.name}: {differs.sum()} tokens")
    return float(differs.float().mean())


def on_cpu(run: Callable[[], Any], repeats: int) -> float:
    """Milliseconds of `run`: the median."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


def measured(batch: Batch, quick: bool) -> dict[str, float]:
    """Milliseconds."""
    _, read, follow = batch.step()
    if batch.logits.is_cuda:
        from benchmarks.ops.machine import time_ms

        read()
        return {"read_ms": time_ms(read), "follow_ms": time_ms(follow)}
    read()  # compiles
    return {"ms": on_cpu(read, 3 if quick else 5)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--only", default="", help="shapes whose names begin so")
    parser.add_argument("--quick", action="store_true", help="tiny shapes")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows: dict[str, Any] = {}
    for shape in shapes(args.quick):
        if not shape.name.startswith(args.only):
            continue
        batch = Batch.make(shape, device)
        row = {"differs": check(batch)} if device.type == "cuda" else {}
        rows[shape.name] = row | measured(batch, args.quick)
        states = tables(shape.ids, shape.length, shape.schema)[0][Column.STATES]
        figures = "  ".join(f"{name} {value:9.3f}" for name, value in rows[shape.name].items())
        print(f"{shape.name:32} {states:5} states  {figures}", flush=True)
    if args.json and device.type == "cuda":
        from benchmarks.ops.machine import measure, write_json

        write_json(args.json, measure(), rows)


if __name__ == "__main__":
    main()
