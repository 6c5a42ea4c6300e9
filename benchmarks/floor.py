"""The floor of a denoise step: bytes that must be read and operations that must be done.

    .venv/bin/python benchmarks/floor.py --requests 1 4 16 64 --context 1024

The figures are for the real geometry of both families on one H200; nothing is run. A step can take
no less than the larger of its bytes over the bandwidth and its operations over the matrix rate. It
reads each weight that a token needs once (an expert only where some token is routed to it: with
uniform routing E (1 - (1 - k/E)^tokens) of E experts) and each request's keys and values once. The
bytes that it writes are few and left out.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import write  # noqa: E402
from benchmarks.published import DIFFUSION_GEMMA, LLADA2_MINI, Geometry  # noqa: E402
from benchmarks.tables import floor as table  # noqa: E402

# One H200 SXM by its data sheet: bytes a second, dense bfloat16 operations a second.
BANDWIDTH, RATE = 4.8e12, 989e12


GEOMETRIES = {"LLaDA2.0-mini": LLADA2_MINI, "DiffusionGemma-26B-A4B": DIFFUSION_GEMMA}


@dataclass(frozen=True)
class Floor:
    """The bytes and operations of one step; a multiply-add is two operations."""

    weight_bytes: float
    cache_bytes: float
    operations: float

    @property
    def milliseconds(self) -> float:
        """The least time of the step on one H200."""
        return 1e3 * max((self.weight_bytes + self.cache_bytes) / BANDWIDTH, self.operations / RATE)

    @property
    def bound(self) -> str:
        """What limits the step: its bytes or its operations."""
        by_bytes = (self.weight_bytes + self.cache_bytes) / BANDWIDTH > self.operations / RATE
        return "bytes" if by_bytes else "operations"


def floor(model: Geometry, requests: int, context: int, width: int = 2) -> Floor:
    """The floor of a step in which `requests` requests denoise, each behind `context` tokens.

    Args:
        model: its geometry.
        requests: canvases in the batch.
        context: tokens before each canvas.
        width: bytes of a weight (2 for bfloat16, 1 for float8); keys and values have 2.
    """
    tokens, hidden = requests * model.canvas, model.hidden
    expert = 3 * hidden * model.width
    touched = model.experts * (1 - (1 - model.chosen / model.experts) ** tokens)
    always = sum(a.layers * a.weights(hidden) for a in model.attention)
    always += sum(3 * hidden * size * layers for size, layers in model.dense.items())
    always += model.moe_layers * hidden * model.experts  # routers
    heads = (2 if model.tied else 1) * hidden * model.vocabulary
    weights = always + heads + model.moe_layers * touched * expert
    per_token = always + heads + model.moe_layers * model.chosen * expert
    cache = attended = 0.0
    for a in model.attention:
        keys = min(context, a.window or context) + model.canvas
        cache += 2.0 * requests * a.layers * keys * a.kv_heads * a.dim * a.values
        attended += 4.0 * tokens * a.layers * keys * a.heads * a.dim
    return Floor(width * weights, cache, 2.0 * tokens * per_token + attended)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--context", type=int, default=1024, help="tokens before each canvas")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    for name, model in GEOMETRIES.items():
        for requests in args.requests:
            bound = floor(model, requests, args.context)
            results.setdefault(name, {})[str(requests)] = {
                "weights_gb": bound.weight_bytes / 1e9,
                "cache_gb": bound.cache_bytes / 1e9,
                "tflop": bound.operations / 1e12,
                "floor_ms": bound.milliseconds,
                "bound": bound.bound,
            }
    for row in table(results):
        print("".join(f"{cell:>24}" if n == 0 else f"{cell:>12}" for n, cell in enumerate(row)))
    write(args.json, "floor", results)


if __name__ == "__main__":
    main()
