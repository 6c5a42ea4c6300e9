"""Routes: how a model's masks are computed on a device, as a pure function of what is available.

A route is an attention backend, the method by which it receives the masks, the CUDA graph mode and
the page size of the KV cache. There are four methods:

- *rules*: this package's kernel takes a mask rule for each request;
- *virtual sequences*: a prefill chunk is cut into its blocks, each non-causal (LLaDA2);
- *causal tensor*: one causal flag for each request (DiffusionGemma);
- *canvas rows*: the causal tensor, and on sliding-window layers each row of a canvas is computed
  again as a separate sequence (DiffusionGemma's reference window on the CPU).

There are no fallbacks. `choose_route` returns a route in which every part works, or refuses what
the user asked for by the name of the option. `obstacle_of_layer` has the table of what each backend
cannot do: vLLM's own rules (``validate_configuration``, ``get_flash_attn_version``), and what these
methods require in addition.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

# vLLM's name for third-party backends, under which this package's backend is registered.
OURS = "CUSTOM"
FLOAT_KV = frozenset({"auto", "float16", "bfloat16"})
FLOAT8_KV = frozenset({"fp8", "fp8_e4m3", "fp8_e5m2"})
KV_CACHE_DTYPES = {
    "FLASH_ATTN": FLOAT_KV | {"fp8", "fp8_e4m3"},
    "TRITON_ATTN": FLOAT_KV | FLOAT8_KV | {"fp8_per_token_head", "int8_per_token_head"},
    "CPU_ATTN": FLOAT_KV | FLOAT8_KV,
    OURS: FLOAT_KV | FLOAT8_KV,
}
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
# FlashAttention 4 loads keys of heads up to 128 in tiles of this many, fastest from pages of that
# size; its kernel for heads of 256 on SM100 accepts no other page size.
FLASH_4_TILE = 128
DEFAULT_GRAPHS = "FULL_AND_PIECEWISE"


class RouteError(ValueError):
    """No route can do what was asked for; the message names the option and the remedy."""


@dataclass(frozen=True)
class Device:
    """The device that attention runs on.

    Attributes:
        platform: ``cuda``, ``rocm``, ``cpu``, or another of vLLM's names.
        capability: the compute capability (major, minor) of a CUDA device.
        triton: whether vLLM can use Triton.
        flash_versions: the versions of FlashAttention that vLLM can use here.
    """

    platform: str
    capability: tuple[int, int] | None = None
    triton: bool = True
    flash_versions: frozenset[int] = frozenset()

    @property
    def major(self) -> int:
        """The major number of the compute capability; 0 if there is none."""
        return self.capability[0] if self.capability else 0

    def __str__(self) -> str:
        if self.capability:
            return "SM{}{}".format(*self.capability)
        return {"cpu": "the CPU platform", "rocm": "ROCm"}.get(self.platform, self.platform)


@dataclass(frozen=True)
class LayerShape:
    """The properties by which attention layers differ.

    Attributes:
        head_size: size of a head.
        window: W of the layers' sliding window, or None.
    """

    head_size: int
    window: int | None = None

    def __str__(self) -> str:
        return "sliding-window layers" if self.window else "global layers"


@dataclass(frozen=True)
class ModelAttention:
    """The attention that a model needs.

    Attributes:
        block_causal: whether prompts and canvases are block-causal (LLaDA2); otherwise prompts are
            causal and canvases bidirectional (DiffusionGemma).
        canvas_length: L, tokens of a canvas.
        layers: the different shapes of its attention layers.
        window: ``dllm.window``, how a canvas sees sliding-window layers.
        dtype: the dtype of queries, without ``torch.``.
    """

    block_causal: bool
    canvas_length: int
    layers: tuple[LayerShape, ...]
    window: str = "symmetric"
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class Options:
    """The options that the user set; None for those left unset.

    Attributes:
        backend: ``--attention-backend``.
        kv_cache_dtype: ``--kv-cache-dtype``.
        graphs: ``cudagraph_mode``, by name.
        page_size: ``--block-size``.
        flash_version: ``--attention-config.flash_attn_version``.
    """

    backend: str | None = None
    kv_cache_dtype: str = "auto"
    graphs: str | None = None
    page_size: int | None = None
    flash_version: int | None = None


@dataclass(frozen=True)
class Route:
    """How a model's masks are computed.

    Attributes:
        backend: vLLM's name of the attention backend, for all layers.
        flash_version: the version of FlashAttention, or None for other backends.
        method: one of the four in this module's docstring.
        graphs: the CUDA graph mode: the requested one, vLLM's default, or the next lower one that
            is correct for the method.
        page_size: the number of tokens in a KV cache page, or None if vLLM's choice is as good.
        reason: the reason for this route, in words.
    """

    backend: str
    flash_version: int | None
    method: str
    graphs: str
    page_size: int | None
    reason: str

    def __str__(self) -> str:
        """The route in one line, for the log."""
        version = f" (FlashAttention {self.flash_version})" if self.flash_version else ""
        pages = f", KV pages of {self.page_size} tokens" if self.page_size else ""
        return f"{self.backend}{version}, {self.method}, CUDA graphs {self.graphs}{pages}: " + (
            self.reason
        )


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
    candidates = candidates_of(device)
    obstacles = {name: obstacle(name, device, model, asked) for name in candidates}
    free = [name for name in candidates if obstacles[name] is None]
    if asked.backend is not None:
        why = obstacle(asked.backend, device, model, asked)
        if why is not None:
            other = f"choose {' or '.join(free)}" if free else _relaxed(device, model, asked)[1]
            raise RouteError(f"--attention-backend {asked.backend}: {why}; {other}")
        reason = "as --attention-backend says"
    elif free:
        refused = [f"{name}: {obstacles[name]}" for name in candidates[: candidates.index(free[0])]]
        reason = "; ".join(refused) or f"the first choice on {device}"
    else:
        option, remedy = _relaxed(device, model, asked)
        tried = "; ".join(f"{name}: {why}" for name, why in obstacles.items())
        raise RouteError(f"{option}: no attention backend can serve this model ({tried}); {remedy}")
    backend = asked.backend or free[0]
    version = None
    if backend == "FLASH_ATTN":
        versions = (flash_version(device, layer.head_size, asked) for layer in model.layers)
        version = min(version for version in versions if version is not None)
    method = method_of(backend, model)
    graphs = graphs_of(device, backend, method, asked.graphs)
    if asked.graphs not in (None, graphs) and device.platform != "cpu":
        reason += f"; no CUDA graph of mode {asked.graphs} is right for {method} on {backend}"
    return Route(
        backend=backend,
        flash_version=version,
        method=method,
        graphs=graphs,
        page_size=page_size(device, model, asked, version),
        reason=reason,
    )


def _relaxed(device: Device, model: ModelAttention, asked: Options) -> tuple[str, str]:
    """The option that prevents every backend from serving the model, and the remedy."""
    relaxations = {
        f"--kv-cache-dtype {asked.kv_cache_dtype}": (
            model,
            replace(asked, kv_cache_dtype="auto"),
            "use --kv-cache-dtype auto",
        ),
        f"dllm.window={model.window}": (
            replace(model, window="symmetric"),
            asked,
            "use window=symmetric (the default, as vLLM does)",
        ),
        f"--block-size {asked.page_size}": (
            model,
            replace(asked, page_size=None),
            "leave --block-size out",
        ),
        f"--dtype {model.dtype}": (
            replace(model, dtype="bfloat16"),
            asked,
            "use --dtype bfloat16",
        ),
    }
    for option, (other_model, other, remedy) in relaxations.items():
        for name in candidates_of(device):
            if obstacle(name, device, other_model, other) is None:
                return option, remedy
    return "--model", f"it cannot be served on {device}"


def obstacle(name: str, device: Device, model: ModelAttention, asked: Options) -> str | None:
    """Why a backend cannot serve a model, or None."""
    for layer in model.layers:
        version = flash_version(device, layer.head_size, asked) if name == "FLASH_ATTN" else None
        why = obstacle_of_layer(name, version, layer, device, model, asked)
        if why is not None:
            return f"{layer}: {why}" if len(model.layers) > 1 else why
    return None


def candidates_of(device: Device) -> tuple[str, ...]:
    """The backends that may serve a model on a device, in order of preference.

    This package's has not been run on a GPU.
    """
    on = {"cuda": ("FLASH_ATTN", "TRITON_ATTN", OURS), "cpu": ("CPU_ATTN", OURS)}
    return on.get(device.platform, ("TRITON_ATTN", OURS))


def obstacle_of_layer(
    name: str,
    version: int | None,
    layer: LayerShape,
    device: Device,
    model: ModelAttention,
    asked: Options,
) -> str | None:
    """Why a backend cannot serve some layers of a model, or None.

    This function is long because it is one table; the first row that applies is the answer.

    Args:
        name: vLLM's name of the backend.
        version: the version of FlashAttention, for ``FLASH_ATTN``.
        layer: the layers.
        device: what they run on.
        model: the model that they belong to.
        asked: what the user asked for.
    """
    infer, flash, triton = name == "FLASHINFER", name == "FLASH_ATTN", name == "TRITON_ATTN"
    size, kv, flash_n = layer.head_size, asked.kv_cache_dtype, f"FlashAttention {version}"
    candidates, unit = candidates_of(device), page_unit(device, layer, version, kv)
    mixed = not model.block_causal  # prompts are causal and canvases are not
    reference = mixed and layer.window is not None and model.window == "reference"
    capability = device.capability or (99, 0)
    # As vLLM's `flash_attn_supports_kv_cache_dtype`.
    hopper = device.major == 9 and (version == 3 or (version == 4 and size == 512))
    flash_float8 = hopper or (device.major == 10 and version == 4)
    # For a whole query tile, vLLM's Triton kernel drops the values beyond the right edge of the
    # window of the tile's *first* row, but leaves their weights in the sum. A canvas of at most W
    # tokens never reaches that edge.
    beyond_window = mixed and layer.window is not None and model.canvas_length > layer.window
    table = (
        (
            infer and model.block_causal,
            "its buffers have one entry for each of max_num_seqs requests, and the blocks of a "
            "prompt are more sequences than that",
        ),
        (
            infer,
            "prompts and canvases of one batch are masked differently, which it cannot express",
        ),
        (name not in KV_CACHE_DTYPES, "it has not been tried with block diffusion"),
        (name not in candidates, f"{device} has {' and '.join(candidates)} only"),
        (kv not in KV_CACHE_DTYPES.get(name, ()), f"it has no KV cache of {kv}"),
        ((asked.page_size or 0) % unit > 0, f"its pages are multiples of {unit} tokens"),
        (flash and version is None, f"vLLM has no FlashAttention for {device} here"),
        (
            flash and model.dtype not in ("float16", "bfloat16"),
            f"FlashAttention has no {model.dtype}",
        ),
        (
            flash and (size % 8 > 0 or size > (512 if version == 4 else 256)),
            f"{flash_n} has no heads of size {size}",
        ),
        (
            flash and kv in FLOAT8_KV and not flash_float8,
            f"{flash_n} has no float8 KV cache for heads of {size} on {device}",
        ),
        (
            flash and mixed and version != 4,
            f"{flash_n} has no causal flag for each request; FlashAttention 4 has one, on SM90",
        ),
        # "dynamic_causal is only supported on SM90": an assertion of FlashAttention 4.
        (
            flash and mixed and device.major != 9,
            f"FlashAttention 4 has a causal flag for each request on SM90, not on {device}",
        ),
        (
            name == "CPU_ATTN" and size not in CPU_HEAD_SIZES,
            f"it has no heads of size {size}",
        ),
        ((triton or name == OURS) and not device.triton, "vLLM has no Triton here"),
        (
            (triton and size < 32) or (name == OURS and not 32 <= size <= 512),
            f"it has no heads of size {size}",
        ),
        # vLLM's `TritonAttentionImpl`, of which this package's is a subclass, raises for both.
        (
            (triton or name == OURS) and kv.startswith("fp8") and capability < (8, 9),
            f"its float8 KV cache needs SM89 or later, this is {device}",
        ),
        (
            (triton or name == OURS) and kv == "bfloat16" and capability < (8, 0),
            f"its bfloat16 KV cache needs SM80 or later, this is {device}",
        ),
        (
            (triton or flash) and reference,
            "it has no left edge of the window that is the same for a whole canvas",
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


def graphs_of(device: Device, backend: str, method: str, asked: str | None) -> str:
    """The CUDA graph mode: the requested one, or the next lower one that is correct.

    A graph of mode ``FULL`` also replays mixed batches. Virtual sequences cannot do that, because
    their number depends on the batch. Of vLLM's backends with a causal tensor, Triton's declares
    that it can (``AttentionCGSupport.ALWAYS``); FlashAttention 2 and 4 and this package's backend
    replay only uniform batches.
    """
    if device.platform == "cpu":
        return "NONE"
    if asked == "FULL" and (backend, method) != ("TRITON_ATTN", "causal tensor"):
        return DEFAULT_GRAPHS
    return asked or DEFAULT_GRAPHS


def page_size(
    device: Device, model: ModelAttention, asked: Options, version: int | None
) -> int | None:
    """The number of tokens in a KV cache page: the requested number, or whole blocks.

    Args:
        device: what attention runs on.
        model: the attention that the model needs.
        asked: what the user asked for.
        version: the version of FlashAttention, or None for other backends.
    """
    if asked.page_size is not None or not model.block_causal:
        return asked.page_size
    # vLLM's default page is 128 on the CPU and 16 elsewhere.
    tile = version == 4 and max(layer.head_size for layer in model.layers) <= FLASH_4_TILE
    default = 128 if device.platform == "cpu" or tile else 16
    dtype = asked.kv_cache_dtype
    units = (page_unit(device, layer, version, dtype) for layer in model.layers)
    unit = math.lcm(model.canvas_length, *units)
    return unit * math.ceil(default / unit)


def flash_version(device: Device, head_size: int, asked: Options) -> int | None:
    """The version of FlashAttention that vLLM uses for layers of a diffusion model, or None.

    This follows vLLM's ``get_flash_attn_version``, which prefers version 4 to 3 for diffusion
    models.
    """
    if device.platform != "cuda" or device.major < 8:
        return None
    there = device.flash_versions
    version = asked.flash_version or (4 if device.major in (9, 10) and 4 in there else 2)
    if asked.flash_version is None and device.major == 9 and version == 2 and 3 in there:
        version = 3
    if version == 3 and (device.major >= 10 or 4 in there):
        version = 4 if 4 in there else 2
    # On SM100, version 4 supports heads of up to 128, and of 256 in a kernel without float8.
    hd256 = device.major < 12 and head_size == 256 and asked.kv_cache_dtype in FLOAT_KV
    if version == 4 and device.major >= 10 and head_size > 128 and not hd256:
        version = 2
    return version if version in there else None


def page_unit(device: Device, layer: LayerShape, version: int | None, kv_cache_dtype: str) -> int:
    """The number that a page's tokens must be a multiple of; `version` is FlashAttention's."""
    if device.platform == "cpu":
        return 32
    if version == 4 and device.major in (10, 11) and layer.head_size == 256:
        return FLASH_4_TILE
    if version == 4 and device.major == 9 and kv_cache_dtype in FLOAT8_KV:
        return 64
    return 16
