"""The geometries of published models; `docs/models.md` says where they come from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Attention:
    """Layers of one kind.

    Attributes:
        layers, heads, kv_heads, dim: how many layers; heads of queries, heads of keys, their size.
        window: keys that a query sees; None for the whole context.
        values: 2 where keys and values have matrices of their own, 1 where V is K.
        rotary: channels of a head that are rotated; None for all.
    """

    layers: int
    heads: int
    kv_heads: int
    dim: int
    window: int | None = None
    values: int = 2
    rotary: int | None = None

    def weights(self, hidden: int) -> int:
        """Numbers in the projections of one layer."""
        return hidden * self.dim * (2 * self.heads + self.values * self.kv_heads)


@dataclass(frozen=True)
class Geometry:
    """A model by its published configuration.

    Attributes:
        canvas: positions of a block.
        dense: width of every dense or shared MLP, to their number.
        experts, chosen, width: routed experts of a layer, how many a token takes, their width.
        moe_layers: layers that have them.
        tied: the embedding is the head; self-conditioning reads it once more.
        positions: the longest context.
        norms: vectors of the hidden size in a layer: norms, and the scale of a router's input.
        head_norms: vectors of a head's size in a layer: the norms of queries and keys.
        float32_router: routers and their biases are kept in float32.
        expert_numbers: numbers that a router has for each expert beside its matrix: bias or scale.
        conditioning: width of self-conditioning's MLP, one of those in `dense`; 0 for none.
        vision: numbers in the vision tower and its projection.
        algorithm: the rule that decodes it by default.
    """

    canvas: int
    hidden: int
    vocabulary: int
    attention: tuple[Attention, ...]
    dense: dict[int, int]
    experts: int = 0
    chosen: int = 0
    width: int = 0
    moe_layers: int = 0
    tied: bool = False
    positions: int = 32768
    norms: int = 2
    head_norms: int = 2
    float32_router: bool = False
    expert_numbers: int = 0
    conditioning: int = 0
    vision: int = 0
    algorithm: str = "LowConfidence"

    @property
    def layers(self) -> int:
        """All of them."""
        return sum(kind.layers for kind in self.attention)

    @property
    def is_uniform(self) -> bool:
        """Canvases are noise that self-conditioning reads; else they are masks."""
        return bool(self.conditioning)


def llada2(layers: int, hidden: int, dense: int, width: int, heads: int) -> Geometry:
    """LLaDA2.0 and 2.1: layer 0 is dense, the others have 256 experts and a shared one."""
    return Geometry(
        canvas=32,
        hidden=hidden,
        vocabulary=157184,
        attention=(Attention(layers, heads, 4, 128, rotary=64),),
        dense={dense: 1, width: layers - 1},
        experts=256,
        chosen=8,
        width=width,
        moe_layers=layers - 1,
        float32_router=True,
        expert_numbers=1,
    )


def sdar(
    layers: int, hidden: int, heads: int, kv_heads: int, width: int, experts: int = 0
) -> Geometry:
    """SDAR, which is Qwen3; `width` is that of an MLP, or of an expert where there are experts."""
    return Geometry(
        canvas=4,
        hidden=hidden,
        vocabulary=151936,
        attention=(Attention(layers, heads, kv_heads, 128),),
        dense={} if experts else {width: layers},
        experts=experts,
        chosen=8 if experts else 0,
        width=width if experts else 0,
        moe_layers=layers if experts else 0,
        algorithm="LowConfidenceDynamic",
    )


def openpangu() -> Geometry:
    """openPangu-R-7B-Diffusion, which is Llama; its biases are counted with the norms."""
    return Geometry(
        canvas=32,
        hidden=4096,
        vocabulary=153376,
        attention=(Attention(34, 32, 8, 128),),
        dense={12800: 34},
        norms=2 + 2,
        head_norms=2 * 8,
        algorithm="SubBlocks",
    )


def nemotron(layers: int, hidden: int, width: int) -> Geometry:
    """Nemotron-Labs-Diffusion, which is Ministral 3."""
    return Geometry(
        canvas=32,
        hidden=hidden,
        vocabulary=131072,
        attention=(Attention(layers, 32, 8, 128),),
        dense={width: layers},
        positions=262144,
        head_norms=0,
        algorithm="ConfidenceThreshold",
    )


NEMOTRON_14B = nemotron(40, 5120, 16384)
LLADA2_MINI = llada2(20, 2048, 5120, 512, 16)
LLADA2_FLASH = llada2(32, 4096, 9216, 1024, 32)
DIFFUSION_GEMMA = Geometry(
    canvas=256,
    hidden=2816,
    vocabulary=262144,
    attention=(Attention(25, 16, 8, 256, window=1024), Attention(5, 16, 2, 512, values=1)),
    dense={2112: 31},
    experts=128,
    chosen=8,
    width=704,
    moe_layers=30,
    tied=True,
    positions=262144,
    norms=8,
    expert_numbers=1,
    conditioning=2112,
    vision=572_794_416,
    algorithm="EntropyBound",
)
# ByteDance-Seed/Stable-DiffCoder-8B-Instruct, which is Llama.
STABLE_DIFFCODER = Geometry(
    canvas=4,
    hidden=4096,
    vocabulary=155136,
    attention=(Attention(32, 32, 8, 128),),
    dense={14336: 32},
    positions=8192,
    head_norms=0,
    algorithm="ConfidenceThreshold",
)
SHAPES = {
    "LLaDA2.x-mini": LLADA2_MINI,
    "LLaDA2.x-flash": LLADA2_FLASH,
    "DiffusionGemma-26B-A4B": DIFFUSION_GEMMA,
    "SDAR-1.7B": sdar(28, 2048, 16, 8, 6144),
    "SDAR-4B": sdar(36, 2560, 32, 8, 9728),
    "SDAR-8B": sdar(36, 4096, 32, 8, 12288),
    "SDAR-30B-A3B": sdar(48, 2048, 32, 4, 768, experts=128),
    "Stable-DiffCoder-8B": STABLE_DIFFCODER,
    "Nemotron-8B": nemotron(34, 4096, 14336),
    "openPangu-R-7B": openpangu(),
}
