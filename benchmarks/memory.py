"""How much memory a model takes on each of several devices, computed from its geometry.

What is split over tensor-parallel ranks and what every rank holds is as in vLLM 0.32's layers:
embedding, head, attention, MLPs and experts are split; norms, routers, self-conditioning and the
vision tower are not. Heads of keys and values are copied where there are more ranks than heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.published import Attention, Geometry

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
    numbers += sum(2 * kind.layers * kind.dim for kind in model.attention)  # norms of heads
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
    norms += sum(2 * kind.layers * kind.dim for kind in model.attention)
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
