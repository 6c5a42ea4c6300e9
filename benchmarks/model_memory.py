"""How much memory published models take, and on how many devices they fit; nothing is run.

    .venv/bin/python benchmarks/model_memory.py            # print the tables of docs/models.md
    .venv/bin/python benchmarks/model_memory.py --write    # put them into docs/models.md
    .venv/bin/python benchmarks/model_memory.py --check    # write nothing; 1 where they differ

What is split over tensor-parallel ranks and what every rank holds is as in vLLM 0.32's layers:
embedding, head, attention, MLPs and experts are split; norms, routers, self-conditioning and the
vision tower are not. Heads of keys and values are copied where there are more ranks than heads.
`tests/benchmarks/test_memory.py` compares the results with published indexes, and
`tests/serving/engines/test_memory.py` with what an engine reports.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.published import SHAPES, Attention, Geometry  # noqa: E402
from benchmarks.report import refreshed, stale  # noqa: E402
from benchmarks.tables import markdown  # noqa: E402
from tests.support.held_bytes import tensor_bytes  # noqa: E402

# vLLM pads the vocabulary to a multiple of this.
VOCABULARY_UNIT = 64


class UnevenError(ValueError):
    """The model cannot be split over so many devices, or not into these groups."""


@dataclass(frozen=True)
class Weights:
    """How the numbers of a model are stored.

    Attributes:
        name: for tables.
        width: bytes of a number that is not quantized.
        matrix: bytes of a matrix of a quantized layer, from its outputs and inputs on one device;
            None where nothing is quantized.
        group: inputs that share a scale; 0 for none.
    """

    name: str
    width: int = 2
    matrix: Callable[[int, int], float] | None = None
    group: int = 0

    def of(self, outputs: int, inputs: int) -> float:
        """Bytes of a matrix of a layer that can be quantized.

        Raises:
            UnevenError: the groups of the whole matrix do not fit its part on one device.
        """
        if self.matrix is None:
            return self.width * outputs * inputs
        if self.group and inputs % self.group:
            raise UnevenError(f"{inputs} inputs are not whole groups of {self.group}")
        return self.matrix(outputs, inputs)


def unquantized(width: int = 2) -> Weights:
    """Numbers of so many bytes."""
    return Weights({2: "bfloat16", 4: "float32"}[width], width)


def float8(width: int = 2) -> Weights:
    """Compressed-tensors' FP8_DYNAMIC: a float32 scale for each output."""
    return Weights("FP8", width, lambda outputs, inputs: outputs * inputs + 4 * outputs)


def int4(group: int, width: int = 2) -> Weights:
    """Compressed-tensors' W4A16: half a byte, and a scale in the model's dtype for each group."""
    return Weights(
        "INT4",
        width,
        lambda outputs, inputs: outputs * inputs / 2 + width * outputs * inputs // group,
        group,
    )


def split(total: int, devices: int, what: str) -> int:
    """The part of one device.

    Raises:
        UnevenError: the parts would be unequal.
    """
    if total % devices:
        raise UnevenError(f"{total} {what} over {devices} devices")
    return total // devices


def kv_heads(kind: Attention, devices: int) -> int:
    """Heads of keys and values on one device."""
    if kind.kv_heads < devices:
        split(devices, kind.kv_heads, "devices, heads of keys and values")
        return 1
    return split(kind.kv_heads, devices, "heads of keys and values")


def matrices(model: Geometry, devices: int) -> Iterator[tuple[int, int, int]]:
    """(how many, outputs, inputs) of the matrices on one device that can be quantized."""
    for kind in model.attention:
        heads = split(kind.heads, devices, "heads")
        # vLLM copies the keys' matrix where a model has no values of its own.
        yield kind.layers, (heads + 2 * kv_heads(kind, devices)) * kind.dim, model.hidden
        yield kind.layers, model.hidden, heads * kind.dim
    for size, count in model.dense.items():
        part = split(size, devices, "channels of an MLP")
        own = count - (size == model.conditioning)
        yield own, 2 * part, model.hidden
        yield own, model.hidden, part
    if model.experts:
        part, count = split(model.width, devices, "channels of an expert"), model.moe_layers
        yield count * model.experts, 2 * part, model.hidden
        yield count * model.experts, model.hidden, part


def plain_numbers(model: Geometry, devices: int) -> int:
    """Numbers on one device that stay in the model's dtype whatever the quantization."""
    padded = math.ceil(model.vocabulary / VOCABULARY_UNIT) * VOCABULARY_UNIT
    rows = split(padded, devices, "token ids")
    numbers = rows * model.hidden * (1 if model.tied else 2)
    numbers += model.layers * model.norms * model.hidden + model.hidden
    numbers += sum(model.head_norms * kind.layers * kind.dim for kind in model.attention)
    if not model.float32_router:
        numbers += routers(model)
    if model.conditioning:
        numbers += 3 * model.hidden * model.conditioning + model.hidden
    return numbers + model.vision


def routers(model: Geometry) -> int:
    """Numbers in all routers, which every device holds."""
    return model.moe_layers * model.experts * (model.hidden + model.expert_numbers)


def parameter_bytes(model: Geometry, weights: Weights, devices: int = 1) -> float:
    """Bytes of the parameters on one device.

    Raises:
        UnevenError: it cannot be split like that.
    """
    total = sum(n * weights.of(*size) for n, *size in matrices(model, devices))
    total += weights.width * plain_numbers(model, devices)
    return total + (4 * routers(model) if model.float32_router else 0)


def table_bytes(model: Geometry, width: int = 2) -> int:
    """Bytes of the tables of rotary positions, which every device holds."""
    channels = {(kind.dim, kind.rotary or kind.dim) for kind in model.attention}
    return width * model.positions * sum(rotary for _, rotary in channels)


def parameters(model: Geometry) -> tuple[int, int]:
    """Numbers in a checkpoint, and those of them that meet a token of text, each once."""
    attention = sum(kind.layers * kind.weights(model.hidden) for kind in model.attention)
    dense = sum(3 * model.hidden * size * count for size, count in model.dense.items())
    expert = 3 * model.hidden * model.width * model.moe_layers
    always = attention + dense + routers(model)
    always += model.hidden * model.vocabulary * (1 if model.tied else 2)
    norms = (model.layers * model.norms + 1 + bool(model.conditioning)) * model.hidden
    norms += sum(model.head_norms * kind.layers * kind.dim for kind in model.attention)
    return (
        always + norms + expert * model.experts + model.vision,
        always + norms + expert * model.chosen,
    )


@dataclass(frozen=True)
class Cache:
    """How vLLM lays out the keys and values of a model on one device.

    Attributes:
        page_bytes: of one block of the pool, which every group of layers draws from.
        groups: tokens in a block and window (None for the whole context), group by group.
    """

    page_bytes: int
    groups: tuple[tuple[int, int | None], ...]

    def blocks(self, tokens: int, in_flight: int) -> int:
        """The most blocks that one request may hold.

        Args:
            tokens: its length.
            in_flight: tokens of the steps that may be under way, of all requests.
        """
        count = 0
        for size, window in self.groups:
            if window is None:
                count += math.ceil(tokens / size)
            else:
                count += math.ceil(min(window - 1 + in_flight, tokens) / size) + 1
        return count

    def tokens(self, pool: float, context: int, in_flight: int) -> int:
        """What vLLM reports as the size of the KV cache: requests of full length, in tokens."""
        return int(int(pool // self.page_bytes) / self.blocks(context, in_flight) * context)


def cache(model: Geometry, devices: int, page: int, width: int = 2) -> Cache:
    """The layout of the KV cache for pages of so many tokens, of numbers of so many bytes."""
    own = {kind: 2 * page * kv_heads(kind, devices) * kind.dim * width for kind in model.attention}
    largest = max(own.values())
    fewest = min(kind.layers for kind in own)
    most = max(kind.layers for kind in own)
    # vLLM shares out layers in groups of equal size, of the rarer kind's unless that is close.
    size = most if most < 1.5 * fewest else fewest
    groups: list[tuple[int, int | None]] = []
    for kind, bytes_of in own.items():
        if largest % bytes_of:
            raise UnevenError(f"pages of {bytes_of} and {largest} bytes")
        count = math.ceil(kind.layers / size)
        groups += [(page * largest // bytes_of, kind.window)] * count
    return Cache(size * largest, tuple(groups))


def token_bytes(model: Geometry, devices: int, width: int = 2) -> int:
    """Bytes of the keys and values of one token in all layers, on one device."""
    numbers = sum(k.layers * kv_heads(k, devices) * k.dim for k in model.attention)
    return 2 * width * numbers


DOCUMENT = ROOT / "docs" / "models.md"
COUNTS = (1, 4)
# Bytes of a device by its name; its memory is a little more.
DEVICES = {"80 GB": 80e9, "141 GB": 141e9}
# vLLM 0.32 on a GPU of 70 GiB or more: its share of the memory, a step's tokens of `vllm serve`,
# how many requests, steps that may be under way.
SHARE, BUDGET, SEATS, UNDER_WAY = 0.92, 8192, 1024, 2
PAGE = 16
# A rule of thumb for how many tensors of the hidden size are alive at the same time for one
# position in a forward pass: residual, norms, queries, keys, values, the inputs and outputs of the
# MLP and of the experts.
FORWARD_COPIES = 16
# Groups of INT4: 128 is compressed-tensors' own, and DiffusionGemma's experts are 704 wide.
GROUPS = {"DiffusionGemma-26B-A4B": 32}


def slot_bytes(model: Geometry, width: int = 2) -> int:
    """Bytes of this package's tensors that one more request takes, by the package's own classes."""
    import torch

    from vllm_dllm.decoding import get_algorithm
    from vllm_dllm.engine.optional_parts import OptionalParts
    from vllm_dllm.engine.slots import AlgorithmSlots, CanvasKind, SlotState
    from vllm_dllm.engine.two_block_window import TwoBlockWindow

    device = torch.device("cpu")
    mask = None if model.is_uniform else model.vocabulary - 1
    kind = CanvasKind(model.canvas, model.vocabulary, mask, aligned=not model.is_uniform)
    rule, _ = get_algorithm(model.algorithm, "uniform" if model.is_uniform else "mask")

    def held(count: int) -> int:
        slots = SlotState(count, kind, device)
        own = AlgorithmSlots(rule, count, model.canvas, device)
        parts = OptionalParts(slots, "raw_logprobs")
        if not model.is_uniform:  # the block before the canvas, where commits are fused
            parts.window = TwoBlockWindow(slots, model.positions)
        optional = [parts.constraints, parts.rows, parts.logprobs, parts.window]
        return tensor_bytes([slots, own.parameters, own.state, *optional])

    soft = model.canvas * model.hidden * width if model.is_uniform else 0
    return held(2) - held(1) + soft


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
    def of(cls, model: Geometry) -> Server:
        """The defaults; see `vllm_dllm/startup/default_limits.py`."""
        from vllm_dllm.startup.default_limits import MOST_SEATS, MOST_SEATS_SELF_CONDITIONED

        seats = min(SEATS, MOST_SEATS_SELF_CONDITIONED if model.is_uniform else MOST_SEATS)
        return cls(seats, max(BUDGET, seats * model.canvas))

    def forward_bytes(self, model: Geometry) -> int:
        """What a step takes beside weights and cache, by a rule of thumb."""
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
    server = Server.of(model)
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


def weights() -> Iterator[Sequence[str]]:
    """The table of parameters, weights, and the least number of devices."""
    yield [
        *("shape", "parameters (meet a token)", "context"),
        *(f"{scheme.name}, GB" for scheme in schemes("")),
        *(f"bfloat16 on {name}: devices, KV tokens" for name in DEVICES),
    ]
    for name, model in SHAPES.items():
        sizes = [parameter_bytes(model, each) + table_bytes(model) for each in schemes(name)]
        fits = [least(model, unquantized(), memory) for memory in DEVICES.values()]
        places = [f"{f.devices}, {f.tokens // 1000:,} k" if f else "more than 8" for f in fits]
        total, active = (f"{count / 1e9:.2f} B" for count in parameters(model))
        counts = total if total == active else f"{total} ({active})"
        yield [name, counts, f"{model.positions:,}", *(f"{s / 1e9:.1f}" for s in sizes), *places]


def caches() -> Iterator[Sequence[str]]:
    """The table of keys and values."""
    yield ["shape", *(f"{n}" for n in COUNTS), "one request of full length on 1"]
    for name, model in SHAPES.items():
        server = Server.of(model)
        layout = cache(model, 1, max(PAGE, 0 if model.is_uniform else model.canvas))
        whole = layout.blocks(model.positions, UNDER_WAY * server.budget) * layout.page_bytes
        sizes = (f"{token_bytes(model, n) / 1024:,.0f}" for n in COUNTS)
        yield [name, *sizes, f"{whole / 1e9:.1f} GB"]


def sections() -> dict[str, str]:
    """The tables by the names of their markers."""
    tables: dict[str, Iterable[Sequence[str]]] = {
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
