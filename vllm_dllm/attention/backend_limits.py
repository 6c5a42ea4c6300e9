"""The rules, of vLLM and of this package, that prevent a backend from serving a model's layers.

These are pure functions. vLLM's rules are those of the backends' ``validate_configuration`` and
``get_flash_attn_version``; this package's rules follow from the methods by which masks are
expressed (see `attention.routes`).
"""

from __future__ import annotations

from vllm_dllm.attention.route_parts import Device, LayerShape, ModelAttention, Options

# vLLM's name for third-party backends, under which this package's backend is registered.
OURS = "CUSTOM"
# The backends that may serve a model, in order of preference. This package's has not been run on a
# GPU.
ON_CUDA = ("FLASH_ATTN", "TRITON_ATTN", OURS)
ON_CPU = ("CPU_ATTN", OURS)
ELSEWHERE = ("TRITON_ATTN", OURS)

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


def candidates_of(device: Device) -> tuple[str, ...]:
    """The backends that may serve a model on a device, in order of preference."""
    return {"cuda": ON_CUDA, "cpu": ON_CPU}.get(device.platform, ELSEWHERE)


def obstacle_of_layer(
    name: str,
    version: int | None,
    layer: LayerShape,
    device: Device,
    model: ModelAttention,
    asked: Options,
) -> str | None:
    """Why a backend cannot serve some layers of a model, or None.

    Args:
        name: vLLM's name of the backend.
        version: the version of FlashAttention, for ``FLASH_ATTN``.
        layer: the layers.
        device: what they run on.
        model: the model that they belong to.
        asked: what the user asked for.
    """
    if name == "FLASHINFER" and model.block_causal:
        return (
            "its buffers have one entry for each of max_num_seqs requests, and the blocks of a "
            "prompt are more sequences than that"
        )
    if name == "FLASHINFER":
        return "prompts and canvases of one batch are masked differently, which it cannot express"
    if name not in KV_CACHE_DTYPES:
        return "it has not been tried with block diffusion"
    if name not in candidates_of(device):
        return f"{device} has {' and '.join(candidates_of(device))} only"
    if asked.kv_cache_dtype not in KV_CACHE_DTYPES[name]:
        return f"it has no KV cache of {asked.kv_cache_dtype}"
    unit = page_unit(device, layer, version, asked.kv_cache_dtype)
    if asked.page_size is not None and asked.page_size % unit:
        return f"its pages are multiples of {unit} tokens"
    if name == "FLASH_ATTN":
        return _obstacle_of_flash(version, layer, device, model, asked)
    if name == "CPU_ATTN":
        fits = layer.head_size in CPU_HEAD_SIZES
        return None if fits else f"it has no heads of size {layer.head_size}"
    return _obstacle_of_triton(name, layer, device, model, asked)


def _obstacle_of_flash(
    version: int | None,
    layer: LayerShape,
    device: Device,
    model: ModelAttention,
    asked: Options,
) -> str | None:
    if version is None:
        return f"vLLM has no FlashAttention for {device} here"
    if model.dtype not in ("float16", "bfloat16"):
        return f"FlashAttention has no {model.dtype}"
    if layer.head_size % 8 or layer.head_size > (512 if version == 4 else 256):
        return f"FlashAttention {version} has no heads of size {layer.head_size}"
    # As vLLM's `flash_attn_supports_kv_cache_dtype`.
    hopper = device.major == 9 and (version == 3 or (version == 4 and layer.head_size == 512))
    if asked.kv_cache_dtype in FLOAT8_KV and not (hopper or (device.major == 10 and version == 4)):
        return (
            f"FlashAttention {version} has no float8 KV cache for heads of {layer.head_size} "
            f"on {device}"
        )
    if model.block_causal:
        return None
    if version != 4:
        return (
            f"FlashAttention {version} has no causal flag for each request; FlashAttention 4 has "
            "one, on SM90"
        )
    # "dynamic_causal is only supported on SM90": an assertion of FlashAttention 4.
    if device.major != 9:
        return f"FlashAttention 4 has a causal flag for each request on SM90, not on {device}"
    if layer.window and model.window == "reference":
        return "it has no left edge of the window that is the same for a whole canvas"
    return None


def _obstacle_of_triton(
    name: str, layer: LayerShape, device: Device, model: ModelAttention, asked: Options
) -> str | None:
    """The obstacle for vLLM's Triton backend, and for this package's, which inherits from it."""
    if not device.triton:
        return "vLLM has no Triton here"
    if layer.head_size < 32 or (name == OURS and layer.head_size > 512):
        return f"it has no heads of size {layer.head_size}"
    # vLLM's `TritonAttentionImpl` raises an error for both.
    if device.platform == "cuda" and device.capability is not None:
        if asked.kv_cache_dtype.startswith("fp8") and device.capability < (8, 9):
            return f"its float8 KV cache needs SM89 or later, this is {device}"
        if asked.kv_cache_dtype == "bfloat16" and device.capability < (8, 0):
            return f"its bfloat16 KV cache needs SM80 or later, this is {device}"
    if name == OURS:
        return None
    if model.block_causal or layer.window is None:
        return None
    if model.window == "reference":
        return "it has no left edge of the window that is the same for a whole canvas"
    # For a whole query tile, vLLM's kernel drops the values beyond the right edge of the window of
    # the tile's *first* row, but leaves their weights in the sum. A canvas of at most W tokens
    # never reaches that edge.
    if model.canvas_length > layer.window:
        return (
            f"a canvas of {model.canvas_length} is longer than the window {layer.window}, which "
            "it computes wrongly"
        )
    return None


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
