"""Routes: how a model's masks are computed on a device, as a pure function of what is available.

A route is an attention backend, the method by which it receives the masks, and the page size of the
KV cache. There are four methods:

- *rules*: this package's kernel takes a mask rule for each request;
- *virtual sequences*: a prefill chunk is cut into its blocks, each non-causal (LLaDA2);
- *causal tensor*: one causal flag for each request (DiffusionGemma);
- *canvas rows*: the causal tensor, and on sliding-window layers each row of a canvas is computed
  again as a separate sequence (DiffusionGemma's reference window on the CPU).

There are no fallbacks: `choose_route` returns a route in which every part works, or refuses what
the user asked for. The limits of backends decide which one a server gets that asks for none, and
keep masks away from backends that would compute them wrongly. Whatever else a backend lacks, vLLM
refuses by the option's name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# vLLM's name for third-party backends, under which this package's backend is registered.
OURS = "CUSTOM"
TRIED = ("FLASH_ATTN", "TRITON_ATTN", "CPU_ATTN", OURS)
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
# Of the CPU's backend and of this package's.
KV_CACHE_DTYPES = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2")
# On the CPU vLLM's default page, and the number that a page's tokens must be a multiple of.
CPU_PAGE, CPU_PAGE_UNIT = 128, 32


class RouteError(ValueError):
    """No route can do what was asked for; the message names the option and the remedy."""


@dataclass(frozen=True)
class Device:
    """The device that attention runs on."""

    platform: str  # ``cuda``, ``rocm``, ``cpu``, or another of vLLM's names
    capability: tuple[int, int] | None = None  # (major, minor) of a CUDA device
    triton: bool = True  # whether vLLM can use Triton
    flash_versions: frozenset[int] = frozenset()  # of FlashAttention, that vLLM can use here

    def __str__(self) -> str:
        if self.capability:
            return "SM{}{}".format(*self.capability)
        return {"cpu": "the CPU platform", "rocm": "ROCm"}.get(self.platform, self.platform)


@dataclass(frozen=True)
class LayerShape:
    """The properties by which attention layers differ."""

    head_size: int  # size of a head
    window: int | None = None  # W of the layers' sliding window, or None

    def __str__(self) -> str:
        return "sliding-window layers" if self.window else "global layers"


@dataclass(frozen=True)
class ModelAttention:
    """The attention that a model needs."""

    # Whether prompts and canvases are block-causal (LLaDA2); otherwise prompts are causal and
    # canvases bidirectional (DiffusionGemma).
    block_causal: bool
    canvas_length: int  # L, tokens of a canvas
    layers: tuple[LayerShape, ...]  # the different shapes of its attention layers
    window: str = "symmetric"  # ``dllm.window``, how a canvas sees sliding-window layers
    dtype: str = "bfloat16"  # the dtype of queries, without ``torch.``


@dataclass(frozen=True)
class Options:
    """The options that the user set; None for those left unset."""

    backend: str | None = None  # ``--attention-backend``
    kv_cache_dtype: str = "auto"  # ``--kv-cache-dtype``
    page_size: int | None = None  # ``--block-size``
    flash_version: int | None = None  # ``--attention-config.flash_attn_version``


@dataclass(frozen=True)
class Route:
    """How a model's masks are computed."""

    backend: str  # vLLM's name of the attention backend, for all layers
    flash_version: int | None  # the version of FlashAttention, or None for other backends
    method: str  # one of the four in this module's docstring
    # The number of tokens in a KV cache page, or None if vLLM's choice is as good.
    page_size: int | None
    reason: str  # the reason for this route, in words

    def __str__(self) -> str:
        """The route in one line, for the log."""
        version = f" (FlashAttention {self.flash_version})" if self.flash_version else ""
        pages = f", KV pages of {self.page_size} tokens" if self.page_size else ""
        return f"{self.backend}{version}, {self.method}{pages}: {self.reason}"


def choose_route(device: Device, model: ModelAttention, asked: Options) -> Route:
    """Choose how a model's masks are computed on a device.

    Raises:
        RouteError: no route can do what was asked for; the message names the option.
    """
    length = model.canvas_length
    if model.block_causal and asked.page_size is not None and asked.page_size % length:
        # The prefix cache would return keys and values of unfinished blocks.
        raise RouteError(
            f"block_size={asked.page_size} is not a multiple of the model's block length {length}; "
            f"leave --block-size out or set it to a multiple of {length}"
        )
    refused: dict[str, str] = {}
    for backend in (asked.backend,) if asked.backend else candidates_of(device):
        why = obstacle(backend, device, model, asked)
        if why is None:
            break
        refused[backend] = why
    else:
        if asked.backend is None:
            tried = "; ".join(f"{name}: {why}" for name, why in refused.items())
            raise RouteError(f"no attention backend on {device} can serve this model ({tried})")
        free = [one for one in candidates_of(device) if obstacle(one, device, model, asked) is None]
        remedy = f"choose {' or '.join(free)}" if free else "no other backend can, either"
        raise RouteError(f"--attention-backend {asked.backend}: {refused[asked.backend]}; {remedy}")
    reason = "; ".join(f"{name}: {why}" for name, why in refused.items())
    version = flash_version(device, asked) if backend == "FLASH_ATTN" else None
    return Route(
        backend=backend,
        flash_version=version,
        method=method_of(backend, model),
        page_size=page_size(device, model, asked, version),
        reason="as --attention-backend says"
        if asked.backend
        else reason or f"the first choice on {device}",
    )


def candidates_of(device: Device) -> tuple[str, ...]:
    """The backends that may serve a model on a device, in order of preference."""
    on = {"cuda": ("FLASH_ATTN", "TRITON_ATTN", OURS), "cpu": ("CPU_ATTN", OURS)}
    return on.get(device.platform, ("TRITON_ATTN", OURS))


def obstacle(name: str, device: Device, model: ModelAttention, asked: Options) -> str | None:
    """Why a backend cannot serve a model, or None."""
    for layer in model.layers:
        why = _obstacle_of_layer(name, layer, device, model, asked)
        if why is not None:
            return f"{layer}: {why}" if len(model.layers) > 1 else why
    return None


def _obstacle_of_layer(
    name: str, layer: LayerShape, device: Device, model: ModelAttention, asked: Options
) -> str | None:
    """Why a backend cannot serve some layers of a model, or None: the first row that applies."""
    flash, triton, cpu = (name == one for one in ("FLASH_ATTN", "TRITON_ATTN", "CPU_ATTN"))
    version = flash_version(device, asked) if flash else None
    candidates = candidates_of(device)
    mixed = not model.block_causal  # prompts are causal and canvases are not
    float8 = asked.kv_cache_dtype.startswith("fp8")
    # For a whole query tile, vLLM's Triton kernel drops the values beyond the right edge of the
    # window of the tile's *first* row, but leaves their weights in the sum. A canvas of at most W
    # tokens never reaches that edge.
    beyond_window = mixed and layer.window is not None and model.canvas_length > layer.window
    table = (
        (name not in TRIED, "it has not been tried with block diffusion"),
        (name not in candidates, f"{device} has {' and '.join(candidates)} only"),
        (
            cpu and asked.kv_cache_dtype not in KV_CACHE_DTYPES,
            f"it has no KV cache of {asked.kv_cache_dtype}",
        ),
        (
            cpu and (asked.page_size or 0) % CPU_PAGE_UNIT,
            f"its pages are multiples of {CPU_PAGE_UNIT} tokens",
        ),
        (
            cpu and layer.head_size not in CPU_HEAD_SIZES,
            f"it has no heads of size {layer.head_size}",
        ),
        ((triton or name == OURS) and not device.triton, "vLLM has no Triton here"),
        (flash and version is None, f"vLLM has no FlashAttention for {device} here"),
        (
            flash and model.dtype not in ("float16", "bfloat16"),
            f"FlashAttention has no {model.dtype} (--dtype)",
        ),
        (flash and float8, "it has no float8 KV cache for every head size (--kv-cache-dtype)"),
        (
            flash and version == 3 and model.block_causal,
            "FlashAttention 3 keeps one entry for each of max_num_seqs requests beside full CUDA "
            "graphs, and the blocks of a prompt are more sequences than that",
        ),
        # "dynamic_causal is only supported on SM90": an assertion of FlashAttention 4.
        (
            flash and mixed and (version != 4 or major_of(device) != 9),
            f"FlashAttention {version} has no causal flag for each request on {device}; "
            "FlashAttention 4 has one, on SM90",
        ),
        # vLLM's `TritonAttentionImpl`, of which this package's is a subclass, raises for it.
        (
            (triton or name == OURS) and float8 and (device.capability or (99, 0)) < (8, 9),
            f"its float8 KV cache (--kv-cache-dtype) needs SM89 or later, this is {device}",
        ),
        (
            (triton or flash) and mixed and layer.window and model.window == "reference",
            "it has no left edge of the window that is the same for a whole canvas "
            "(dllm.window=reference)",
        ),
        (
            triton and beyond_window,
            f"a canvas of {model.canvas_length} is longer than the window {layer.window}, which "
            "it computes wrongly",
        ),
    )
    return next((why for holds, why in table if holds), None)


def method_of(backend: str, model: ModelAttention) -> str:
    """The method by which a backend without obstacles receives a model's masks."""
    if backend == OURS:
        return "rules"
    if model.block_causal:
        return "virtual sequences"
    windowed = any(layer.window for layer in model.layers)
    return "canvas rows" if windowed and model.window == "reference" else "causal tensor"


def page_size(
    device: Device, model: ModelAttention, asked: Options, version: int | None
) -> int | None:
    """The number of tokens in a KV cache page: the requested number, or whole blocks.

    `version` is that of FlashAttention, or None for other backends.
    """
    if asked.page_size is not None or not model.block_causal:
        return asked.page_size
    usual, unit = CPU_PAGE, CPU_PAGE_UNIT
    if device.platform != "cpu":  # tiles of FlashAttention 4 have 128 keys
        usual = unit = 128 if version == 4 else 16
    unit = math.lcm(model.canvas_length, unit)
    return unit * math.ceil(usual / unit)


def flash_version(device: Device, asked: Options) -> int | None:
    """The version of FlashAttention that vLLM uses for a diffusion model, or None.

    This follows vLLM's ``get_flash_attn_version``, which prefers version 4 to 3 for diffusion
    models. On SM100 vLLM takes version 2 for some heads, where the difference has no effect here.
    """
    there, major = device.flash_versions, major_of(device)
    if device.platform != "cuda" or major < 8:
        return None
    newest = [version for version in (4, 3) if version in there and major in (9, 10)]
    version = asked.flash_version or next(iter(newest), 2)
    if version == 3 and (major >= 10 or 4 in there):
        version = 4 if 4 in there else 2
    return version if version in there else None


def major_of(device: Device) -> int:
    """The major number of the compute capability; 0 if there is none."""
    return device.capability[0] if device.capability else 0
