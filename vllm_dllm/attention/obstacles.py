"""The limits of GPU attention backends, and the options that rule out a route.

The rows of the table are vLLM's own rules (``validate_configuration``, ``get_flash_attn_version``),
and what the methods of `routes` require in addition.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from vllm_dllm.attention.routes import (
    CPU_KV_CACHE_DTYPES,
    CPU_PAGE_UNIT,
    OURS,
    Device,
    LayerShape,
    ModelAttention,
    Options,
    candidates_of,
    obstacle,
)

FLOAT_KV = frozenset({"auto", "float16", "bfloat16"})
FLOAT8_KV = frozenset({"fp8", "fp8_e4m3", "fp8_e5m2"})
KV_CACHE_DTYPES = {
    "FLASH_ATTN": FLOAT_KV | {"fp8", "fp8_e4m3"},
    "TRITON_ATTN": FLOAT_KV | FLOAT8_KV | {"fp8_per_token_head", "int8_per_token_head"},
    "CPU_ATTN": CPU_KV_CACHE_DTYPES,
    OURS: FLOAT_KV | FLOAT8_KV,
}
# FlashAttention 4 loads keys of heads up to 128 in tiles of this many, fastest from pages of that
# size; its kernel for heads of 256 on SM100 accepts no other page size.
FLASH_4_TILE = 128


def obstacle_of_layer(
    name: str, layer: LayerShape, device: Device, model: ModelAttention, asked: Options
) -> str | None:
    """Why a backend cannot serve some layers of a model, or None.

    This function is long because it is one table; the first row that applies is the answer.
    """
    infer, flash, triton = name == "FLASHINFER", name == "FLASH_ATTN", name == "TRITON_ATTN"
    size, kv, major = layer.head_size, asked.kv_cache_dtype, major_of(device)
    version = flash_version(device, size, asked) if flash else None
    flash_n = f"FlashAttention {version}"
    candidates, unit = candidates_of(device), page_unit(device, layer, version, kv)
    mixed = not model.block_causal  # prompts are causal and canvases are not
    reference = mixed and layer.window is not None and model.window == "reference"
    capability = device.capability or (99, 0)
    # As vLLM's `flash_attn_supports_kv_cache_dtype`.
    hopper = major == 9 and (version == 3 or (version == 4 and size == 512))
    flash_float8 = hopper or (major == 10 and version == 4)
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
            flash and version == 3 and model.block_causal,
            "FlashAttention 3 keeps one entry for each of max_num_seqs requests beside full CUDA "
            "graphs, and the blocks of a prompt are more sequences than that",
        ),
        (
            flash and mixed and version != 4,
            f"{flash_n} has no causal flag for each request; FlashAttention 4 has one, on SM90",
        ),
        # "dynamic_causal is only supported on SM90": an assertion of FlashAttention 4.
        (
            flash and mixed and major != 9,
            f"FlashAttention 4 has a causal flag for each request on SM90, not on {device}",
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


def refusal(
    refused: Mapping[str, str], device: Device, model: ModelAttention, asked: Options
) -> str:
    """The message for a model that no backend can serve, or not the requested one.

    Args:
        refused: why each backend that came into question cannot.
        device: what attention runs on.
        model: the attention that the model needs.
        asked: what the user asked for.
    """
    candidates = candidates_of(device)
    free = [name for name in candidates if obstacle(name, device, model, asked) is None]
    # Options that may prevent every backend from serving the model, and how it would be without.
    relaxations = (
        (
            f"--kv-cache-dtype {asked.kv_cache_dtype}",
            "use --kv-cache-dtype auto",
            (model, replace(asked, kv_cache_dtype="auto")),
        ),
        (
            f"dllm.window={model.window}",
            "use window=symmetric (the default, as vLLM does)",
            (replace(model, window="symmetric"), asked),
        ),
        (
            f"--block-size {asked.page_size}",
            "leave --block-size out",
            (model, replace(asked, page_size=None)),
        ),
        (
            f"--dtype {model.dtype}",
            "use --dtype bfloat16",
            (replace(model, dtype="bfloat16"), asked),
        ),
    )
    option, remedy = "--model", f"it cannot be served on {device}"
    for prevents, instead, without in relaxations:
        if any(obstacle(name, device, *without) is None for name in candidates):
            option, remedy = prevents, instead
            break
    if asked.backend is not None:
        remedy = f"choose {' or '.join(free)}" if free else remedy
        return f"--attention-backend {asked.backend}: {refused[asked.backend]}; {remedy}"
    tried = "; ".join(f"{name}: {why}" for name, why in refused.items())
    return f"{option}: no attention backend can serve this model ({tried}); {remedy}"


def usual_page(
    device: Device, model: ModelAttention, asked: Options, version: int | None
) -> tuple[int, int]:
    """The page that is fast on a GPU, and the number that a page's tokens must be a multiple of."""
    dtype = asked.kv_cache_dtype
    units = (page_unit(device, layer, version, dtype) for layer in model.layers)
    is_tile = version == 4 and max(layer.head_size for layer in model.layers) <= FLASH_4_TILE
    return FLASH_4_TILE if is_tile else 16, math.lcm(*units)


def page_unit(device: Device, layer: LayerShape, version: int | None, kv_cache_dtype: str) -> int:
    """The number that a page's tokens must be a multiple of; `version` is FlashAttention's."""
    if device.platform == "cpu":
        return CPU_PAGE_UNIT
    if version == 4 and major_of(device) in (10, 11) and layer.head_size == 256:
        return FLASH_4_TILE
    if version == 4 and major_of(device) == 9 and kv_cache_dtype in FLOAT8_KV:
        return 64
    return 16


def flash_version(device: Device, head_size: int, asked: Options) -> int | None:
    """The version of FlashAttention that vLLM uses for layers of a diffusion model, or None.

    This follows vLLM's ``get_flash_attn_version``, which prefers version 4 to 3 for diffusion
    models.
    """
    there, major = device.flash_versions, major_of(device)
    if device.platform != "cuda" or major < 8:
        return None
    version = asked.flash_version or (4 if major in (9, 10) and 4 in there else 2)
    if asked.flash_version is None and major == 9 and version == 2 and 3 in there:
        version = 3
    if version == 3 and (major >= 10 or 4 in there):
        version = 4 if 4 in there else 2
    # On SM100, version 4 supports heads of up to 128, and of 256 in a kernel without float8.
    hd256 = major < 12 and head_size == 256 and asked.kv_cache_dtype in FLOAT_KV
    if version == 4 and major >= 10 and head_size > 128 and not hd256:
        version = 2
    return version if version in there else None


def major_of(device: Device) -> int:
    """The major number of the compute capability; 0 if there is none."""
    return device.capability[0] if device.capability else 0
