"""The limits of attention backends, other than the CPU's own.

These rules decide which backend a server gets that asks for none, and keep masks away from backends
that would compute them wrongly. Whatever else a backend lacks, vLLM refuses by the option's name.
"""

from __future__ import annotations

from collections.abc import Mapping

from vllm_dllm.attention.routes import (
    OURS,
    Device,
    LayerShape,
    ModelAttention,
    Options,
    candidates_of,
    obstacle,
)

TRIED = ("FLASH_ATTN", "TRITON_ATTN", "CPU_ATTN", OURS)


def obstacle_of_layer(
    name: str, layer: LayerShape, device: Device, model: ModelAttention, asked: Options
) -> str | None:
    """Why a backend cannot serve some layers of a model, or None: the first row that applies."""
    flash, triton = name == "FLASH_ATTN", name == "TRITON_ATTN"
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


def refusal(
    refused: Mapping[str, str], device: Device, model: ModelAttention, asked: Options
) -> str:
    """The message for a model that no backend can serve, or not the requested one.

    `refused` says why each backend that came into question cannot.
    """
    if asked.backend is None:
        tried = "; ".join(f"{name}: {why}" for name, why in refused.items())
        return f"no attention backend on {device} can serve this model ({tried})"
    free = [one for one in candidates_of(device) if obstacle(one, device, model, asked) is None]
    remedy = f"choose {' or '.join(free)}" if free else "no other backend can, either"
    return f"--attention-backend {asked.backend}: {refused[asked.backend]}; {remedy}"


def usual_page(version: int | None) -> int:
    """The page that is fast on a GPU; tiles of FlashAttention (`version`) 4 have 128 keys."""
    return 128 if version == 4 else 16


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
