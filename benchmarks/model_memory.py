"""How much memory published models take, and on how many devices they fit; nothing is run.

    .venv/bin/python benchmarks/model_memory.py            # print the tables of docs/models.md
    .venv/bin/python benchmarks/model_memory.py --write    # put them into docs/models.md
    .venv/bin/python benchmarks/model_memory.py --check    # write nothing; 1 where they differ

`benchmarks/memory.py` computes what one device holds; `tests/test_benchmarks_memory.py` and
`tests/engine/test_memory.py` compare that with published indexes and with what an engine reports.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.memory import (  # noqa: E402
    UnevenError,
    Weights,
    cache,
    float8,
    int4,
    parameter_bytes,
    parameters,
    table_bytes,
    token_bytes,
    unquantized,
)
from benchmarks.published import SHAPES, Geometry  # noqa: E402
from benchmarks.report import refreshed, stale  # noqa: E402
from benchmarks.tables import markdown  # noqa: E402
from tests.support.held_bytes import tensor_bytes  # noqa: E402

DOCUMENT = ROOT / "docs" / "models.md"
COUNTS = (1, 2, 4, 8)
# Bytes of a device by its name; its memory is a little more.
DEVICES = {"80 GB": 80e9, "141 GB": 141e9}
# vLLM 0.32 on a GPU of 70 GiB or more: its share of the memory, a step's tokens of `vllm serve`,
# how many requests, steps that may be under way.
SHARE, BUDGET, SEATS, UNDER_WAY = 0.92, 8192, 1024, 2
PAGE = 16
# Groups of INT4: 128 is compressed-tensors' own, and DiffusionGemma's experts are 704 wide.
GROUPS = {"DiffusionGemma-26B-A4B": 32}


def slot_bytes(model: Geometry, width: int = 2) -> int:
    """Bytes of this package's tensors that one more request takes, by the package's own classes."""
    import torch

    from vllm_dllm.decoding import get_algorithm
    from vllm_dllm.engine.algorithm_state import AlgorithmSlots
    from vllm_dllm.engine.slots import CanvasKind, SlotState
    from vllm_dllm.engine.two_blocks import TwoBlockWindow

    device = torch.device("cpu")
    mask = None if model.is_uniform else model.vocabulary - 1
    kind = CanvasKind(model.canvas, model.vocabulary, mask, aligned=not model.is_uniform)
    rule, _ = get_algorithm(model.algorithm, "uniform" if model.is_uniform else "mask")

    def held(count: int) -> int:
        slots = SlotState(count, kind, device)
        if not model.is_uniform:  # the block before the canvas, where commits are fused
            slots.window = TwoBlockWindow(slots, model.positions)
        own = AlgorithmSlots(rule, count, model.canvas, device)
        return tensor_bytes([slots, own.parameters, own.state])

    soft = model.canvas * model.hidden * width if model.is_uniform else 0
    ranks = 4 * model.canvas  # of logprobs
    return held(2) - held(1) + ranks + soft


@dataclass(frozen=True)
class Server:
    """A server with default settings.

    Attributes:
        seats: requests at a time.
        budget: tokens of a step.
    """

    seats: int
    budget: int

    @classmethod
    def of(cls, model: Geometry, memory: float) -> Server:
        """The defaults on a device of so many bytes; see `vllm_dllm/startup/default_limits.py`."""
        from vllm_dllm.startup.default_limits import (
            MOST_SEATS,
            MOST_SEATS_SELF_CONDITIONED,
            canvas_bytes,
            default_seats,
        )

        seats = min(SEATS, MOST_SEATS)
        if model.is_uniform:
            each = canvas_bytes(model.canvas, model.hidden, 2)
            seats = default_seats(int(memory), each, min(SEATS, MOST_SEATS_SELF_CONDITIONED))
        return cls(seats, max(BUDGET, seats * model.canvas))

    def forward_bytes(self, model: Geometry) -> int:
        """What a step takes beside weights and cache, by the package's rule of thumb."""
        from vllm_dllm.startup.default_limits import FORWARD_COPIES

        # Self-conditioned input embeddings have a buffer of their own.
        return self.budget * model.hidden * 2 * (FORWARD_COPIES + model.is_uniform)


@dataclass(frozen=True)
class Fit:
    """The least number of devices that serve a request of full length, and the tokens of the cache.

    Attributes:
        devices: how many.
        tokens: as vLLM reports the size of the KV cache, for requests of full length.
    """

    devices: int
    tokens: int


def least(model: Geometry, weights: Weights, memory: float) -> Fit | None:
    """The fewest devices of so many bytes on which a model fits; None for more than eight."""
    server = Server.of(model, memory)
    state = server.seats * slot_bytes(model) + server.forward_bytes(model) + table_bytes(model)
    for devices in COUNTS:
        try:
            pool = SHARE * memory - parameter_bytes(model, weights, devices) - state
            layout = cache(model, devices, max(PAGE, 0 if model.is_uniform else model.canvas))
        except UnevenError:
            continue
        tokens = layout.tokens(pool, model.positions, UNDER_WAY * server.budget) if pool > 0 else 0
        if tokens >= model.positions:
            return Fit(devices, tokens)
    return None


def schemes(name: str) -> list[Weights]:
    """In what a model's weights may be stored."""
    return [unquantized(), float8(), int4(GROUPS.get(name, 128))]


def shapes() -> Iterator[Sequence[str]]:
    """The table of geometries."""
    yield [
        *("shape", "parameters", "meet a token", "layers", "hidden", "heads / of keys x size"),
        *("MLP", "experts x width (chosen)", "token ids", "context"),
    ]
    for name, model in SHAPES.items():
        total, active = parameters(model)
        heads = [f"{a.heads} / {a.kv_heads} x {a.dim}" for a in model.attention]
        counts = [str(a.layers) for a in model.attention]
        experts = f"{model.experts} x {model.width} ({model.chosen})" if model.experts else ""
        wide = max(model.dense, default=0)
        yield [
            *(name, f"{total / 1e9:.2f} B", f"{active / 1e9:.2f} B", " + ".join(counts)),
            *(f"{model.hidden:,}", "; ".join(heads), f"{wide:,}" if wide else "", experts),
            *(f"{model.vocabulary:,}", f"{model.positions:,}"),
        ]


def weights() -> Iterator[Sequence[str]]:
    """The table of weights, and of the least number of devices."""
    yield [
        *("shape", "weights", *(f"{n}" for n in COUNTS)),
        *(f"{name}: devices, KV tokens" for name in DEVICES),
    ]
    for name, model in SHAPES.items():
        for scheme in schemes(name):
            parts = [_gigabytes(model, scheme, devices) for devices in COUNTS]
            fits = [least(model, scheme, memory) for memory in DEVICES.values()]
            places = [f"{f.devices}, {f.tokens // 1000:,} k" if f else "more than 8" for f in fits]
            stored = f"{scheme.name}, groups of {scheme.group}" if scheme.group else scheme.name
            yield [name, stored, *parts, *places]


def _gigabytes(model: Geometry, scheme: Weights, devices: int) -> str:
    try:
        return f"{(parameter_bytes(model, scheme, devices) + table_bytes(model)) / 1e9:.1f}"
    except UnevenError:
        return "-"


def caches() -> Iterator[Sequence[str]]:
    """The table of keys and values, and of this package's own state."""
    yield [
        *("shape", *(f"{n}" for n in COUNTS)),
        *("one request of full length on 1", "state of a request", "requests by default"),
    ]
    for name, model in SHAPES.items():
        server = Server.of(model, min(DEVICES.values()))
        layout = cache(model, 1, max(PAGE, 0 if model.is_uniform else model.canvas))
        whole = layout.blocks(model.positions, UNDER_WAY * server.budget) * layout.page_bytes
        yield [
            *(name, *(f"{token_bytes(model, n) / 1024:,.0f}" for n in COUNTS)),
            *(f"{whole / 1e9:.1f} GB", f"{slot_bytes(model) / 1024:,.1f} KiB", str(server.seats)),
        ]


def sections() -> dict[str, str]:
    """The tables by the names of their markers."""
    tables: dict[str, Iterable[Sequence[str]]] = {
        "model_shapes": shapes(),
        "model_weights": weights(),
        "model_caches": caches(),
    }
    return {name: "\n".join(markdown(rows)) for name, rows in tables.items()}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="put the tables into docs/models.md")
    parser.add_argument("--check", action="store_true", help="write nothing, find stale tables")
    args = parser.parse_args(argv)
    found = sections()
    if args.check or args.write:
        text = DOCUMENT.read_text(encoding="utf-8")
        wrong = stale(text, found)
        if args.write and wrong:
            DOCUMENT.write_text(refreshed(text, found), encoding="utf-8")
        for name in wrong if args.check else ():
            print(f"docs/models.md: the table {name} is stale; run with --write", file=sys.stderr)
        return 1 if args.check and wrong else 0
    for name, body in found.items():
        print(f"{name}\n\n{body}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
