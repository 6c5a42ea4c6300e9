"""What a denoise step costs each device of a layout: bytes, operations, communication, memory.

Everything is computed from geometries and data sheets. Nothing of it was run on a GPU. A layout
splits attention, dense MLPs and the head over `tensor` devices. `group` such ranks share one set of
experts, which are whole and spread over all `tensor * group` devices (vLLM's expert parallelism of
data-parallel ranks); with a group of 1 the experts are split like everything else. `replicas` such
groups are independent servers. The step of a device is `benchmarks.floor.floor` of its share, and
then the communication, which nothing hides.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.floor import BANDWIDTH, RATE, floor
from benchmarks.memory import (
    UnevenError,
    cache,
    kv_heads,
    parameter_bytes,
    split,
    table_bytes,
    unquantized,
)
from benchmarks.model_memory import BUDGET, PAGE, SHARE, UNDER_WAY, Server, slot_bytes
from benchmarks.published import DIFFUSION_GEMMA, LLADA2_FLASH, Geometry

# Bytes of one H200's memory, by its data sheet.
MEMORY = 141e9
# Devices that NVLink joins: an HGX H200 board has eight, by its data sheet.
NODE = 8
# Bytes a second that a device sends over NVLink: 450 GB/s is the line rate (half of the data
# sheet's 900 GB/s, which counts both directions) and 370 what NCCL reaches, by its maintainer
# (github.com/NVIDIA/nccl-tests, issue 212).
NVLINK = 370e9
# Bytes a second that a device sends over the network: a port of 400 Gbit/s for each device. The
# README of DeepEP has 43 to 47 GB/s for such ports, out of 50.
NETWORK = 45e9
# Seconds that a collective takes beside its bytes. Within a node NCCL's small all-reduce takes 6
# microseconds on two H100 (github.com/NVIDIA/nccl, issue 1259), and 10 is assumed for up to eight;
# 30 for an exchange between nodes is assumed without a source.
NVLINK_WAIT, NETWORK_WAIT = 10e-6, 30e-6
# Bytes of a number that is computed with or sent.
WIDTH = 2


@dataclass(frozen=True)
class Model:
    """A model, and what its steps are assumed to be.

    Attributes:
        name: its key in `MODELS`.
        geometry: as published.
        reductions: sums over tensor-parallel ranks in a layer: after attention, and after each
            MLP or set of experts that is not summed together with another one.
        further: such sums of a hidden vector for every position outside the layers: the embedding,
            and self-conditioning's.
        tokens: that a pass of one request yields on average, its commits included.
    """

    name: str
    geometry: Geometry
    reductions: int
    further: int
    tokens: float


# Tokens: LLaDA2.0-flash's mean in the LLaDA2.1 report (arXiv 2602.08676). Commits are fused here.
FLASH = Model("LLaDA2.0-flash", LLADA2_FLASH, reductions=2, further=1, tokens=3.08)
# Tokens: the fewest there can be, a canvas of 256 in 48 steps (the published `max_denoising_steps`)
# and its commit. Canvases that stop early take fewer steps.
GEMMA = Model("DiffusionGemma-26B-A4B", DIFFUSION_GEMMA, 3, 2, tokens=256 / 49)
MODELS = {model.name: model for model in (FLASH, GEMMA)}


@dataclass(frozen=True)
class Layout:
    """How the devices are used; see the module.

    Attributes:
        tensor: devices of a rank, at most those of a node.
        group: ranks that share a set of experts.
        replicas: groups.
    """

    tensor: int = 1
    group: int = 1
    replicas: int = 1

    @property
    def sharing(self) -> int:
        """Devices that hold one set of experts."""
        return self.tensor * self.group

    @property
    def devices(self) -> int:
        """All of them."""
        return self.sharing * self.replicas

    def __str__(self) -> str:
        names = {"tensor": self.tensor, "expert": self.sharing if self.group > 1 else 1}
        words = [f"{name} {size}" for name, size in names.items() if size > 1]
        return ", ".join([*words, f"{self.replicas} x"]) if words else f"{self.replicas} x 1 device"


def layouts(devices: int) -> Iterator[Layout]:
    """All layouts of so many devices, in powers of two."""
    tensor = 1
    while tensor <= min(devices, NODE):
        group = 1
        while tensor * group <= devices:
            if devices % (tensor * group) == 0:
                yield Layout(tensor, group, devices // (tensor * group))
            group *= 2
        tensor *= 2


def share(model: Geometry, tensor: int) -> Geometry:
    """What one of `tensor` devices computes of everything but the experts, as a geometry.

    Heads of keys and values are copied where there are more devices than heads; routers and
    self-conditioning are whole on every device (see `benchmarks/memory.py`).

    Raises:
        UnevenError: it cannot be split like that.
    """
    attention = tuple(
        replace(a, heads=split(a.heads, tensor, "heads"), kv_heads=kv_heads(a, tensor))
        for a in model.attention
    )
    dense: dict[int, int] = {}
    for size, count in model.dense.items():
        whole = int(size == model.conditioning)
        parts = {split(size, tensor, "channels of an MLP"): count - whole, size: whole}
        for part, number in parts.items() if tensor > 1 else [(size, count)]:
            dense[part] = dense.get(part, 0) + number
    vocabulary = split(model.vocabulary, tensor, "token ids")
    return replace(model, attention=attention, dense=dense, vocabulary=vocabulary, chosen=0)


@dataclass(frozen=True)
class Step:
    """One step of one device.

    Attributes:
        read: bytes from its memory.
        operations: a multiply-add is two.
        nvlink, network: bytes that it sends.
        waits: seconds of its collectives beside their bytes.
    """

    read: float
    operations: float
    nvlink: float
    network: float
    waits: float

    @property
    def computing(self) -> float:
        """Seconds for bytes and operations, whichever takes longer."""
        return max(self.read / BANDWIDTH, self.operations / RATE)

    @property
    def communicating(self) -> float:
        """Seconds for what is sent, and for waiting."""
        return self.nvlink / NVLINK + self.network / NETWORK + self.waits

    @property
    def seconds(self) -> float:
        """All of the step: nothing hides the communication."""
        return self.computing + self.communicating


def all_reduce_bytes(size: float, ranks: int) -> float:
    """Bytes that a rank sends to sum `size` bytes over all ranks: 2 (n - 1) / n of them, by rings.

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations", 2009.
    """
    return 2 * (ranks - 1) / ranks * size


def others_reached(places: int, chosen: int) -> float:
    """The mean number of other places among those of `chosen` experts, each at a random place."""
    return (places - 1) * (1 - (1 - 1 / places) ** chosen)


def exchange(model: Model, layout: Layout, tokens: float) -> tuple[float, float]:
    """Bytes that a device sends over NVLink and over the network for the experts of one layer.

    A token's vector goes once to every other device that has an expert of its own, and back as a
    sum (as DeepEP does). Between nodes it goes once to each node; NVLink carries it from there,
    which is counted as if it came from this device. The devices of a rank share its tokens.

    Args:
        model: the model.
        layout: with a group of more than 1.
        tokens: of one rank.
    """
    geometry, size = model.geometry, WIDTH * model.geometry.hidden * tokens / layout.tensor
    nodes = max(1, layout.sharing // NODE)
    there_and_back = 2 * size
    nvlink = others_reached(layout.sharing, geometry.chosen)
    return there_and_back * nvlink, there_and_back * others_reached(nodes, geometry.chosen)


def exchange_with_all(model: Model, layout: Layout, tokens: float) -> float:
    """Bytes that a device sends in a step if every token's vector goes to every other device.

    This is what vLLM does unless `--all2all-backend` says otherwise (`allgather_reducescatter`).
    """
    if layout.group == 1:
        return 0.0
    size = WIDTH * model.geometry.hidden * tokens / layout.tensor
    return 2 * size * (layout.sharing - 1) * model.geometry.moe_layers


def step(model: Model, layout: Layout, requests: float, context: int) -> Step:
    """The step of a device where every rank denoises `requests` requests behind `context` tokens.

    Experts are chosen uniformly, so that all devices have the same load.

    Raises:
        UnevenError: the model cannot be split like that.
    """
    geometry, tensor = model.geometry, layout.tensor
    own = floor(share(geometry, tensor), requests, context)
    # All experts of the group, and the tokens of all its ranks.
    together = layout.group * requests
    every = floor(geometry, together, context)
    rest = floor(replace(geometry, chosen=0), together, context)
    split(geometry.experts if layout.group > 1 else geometry.width, layout.sharing, "experts")
    experts = (every.weight_bytes - rest.weight_bytes) / layout.sharing
    operations = own.operations + (every.operations - rest.operations) / layout.sharing

    tokens = requests * geometry.canvas
    vectors = WIDTH * geometry.hidden * tokens
    sums = model.reductions * geometry.layers + model.further if tensor > 1 else 0
    nvlink = sums * all_reduce_bytes(vectors, tensor)
    network, waits = 0.0, sums * NVLINK_WAIT
    if layout.group > 1:
        near, far = exchange(model, layout, tokens)
        nvlink += geometry.moe_layers * near
        network += geometry.moe_layers * far
        wait = NETWORK_WAIT if layout.sharing > NODE else NVLINK_WAIT
        waits += 2 * geometry.moe_layers * wait
    read = own.weight_bytes + own.cache_bytes + experts
    return Step(read, operations, nvlink, network, waits)


def weight_bytes(model: Model, layout: Layout) -> float:
    """Bytes of weights on a device, in bfloat16, rotary tables included.

    Raises:
        UnevenError: the model cannot be split like that.
    """
    geometry, scheme = model.geometry, unquantized()
    if layout.group == 1:
        return parameter_bytes(geometry, scheme, layout.tensor) + table_bytes(geometry)
    bare = replace(geometry, width=0)
    experts = parameter_bytes(geometry, scheme) - parameter_bytes(bare, scheme)
    own = parameter_bytes(bare, scheme, layout.tensor) + table_bytes(geometry)
    return own + experts / layout.sharing


def held(model: Model, layout: Layout, requests: int, tokens: int) -> float:
    """Bytes that a device must have: weights, requests of so many tokens, a step's tensors.

    Counted as in `benchmarks/model_memory.py`, in bfloat16; vLLM uses `SHARE` of the memory.

    Raises:
        UnevenError: the model cannot be split like that.
    """
    geometry = model.geometry
    server = Server(requests, max(BUDGET, requests * geometry.canvas))
    pages = cache(geometry, layout.tensor, max(PAGE, 0 if geometry.is_uniform else geometry.canvas))
    each = pages.blocks(tokens, UNDER_WAY * server.budget) * pages.page_bytes
    state = state_bytes(model.name) + each
    whole = weight_bytes(model, layout) + server.forward_bytes(geometry)
    return whole + requests * state


@functools.cache
def state_bytes(name: str) -> int:
    """Bytes of this package's own tensors for one request; see `model_memory.slot_bytes`."""
    return slot_bytes(MODELS[name].geometry)


def fits(model: Model, layout: Layout, requests: int, tokens: int) -> bool:
    """Whether a device holds its share, with `requests` requests of so many tokens on each rank."""
    try:
        return held(model, layout, requests, tokens) <= SHARE * MEMORY
    except UnevenError:
        return False
