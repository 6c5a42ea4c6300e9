"""Routes: how a model's masks are computed on a device, as a pure function of what is available.

A route is an attention backend, the method by which it receives the masks, the CUDA graph mode and
the page size of the KV cache. There are four methods:

- *rules*: this package's kernel takes a mask rule for each request;
- *virtual sequences*: a prefill chunk is cut into its blocks, each non-causal (LLaDA2);
- *causal tensor*: one causal flag for each request (DiffusionGemma);
- *canvas rows*: the causal tensor, and on sliding-window layers each row of a canvas is computed
  again as a separate sequence (DiffusionGemma's reference window on the CPU).

There are no fallbacks. `choose_route` returns a route in which every part works, or refuses what
the user asked for by the name of the option. The rules are those of vLLM's backends
(``validate_configuration``, ``get_flash_attn_version``) and what these methods require in addition.
"""

from __future__ import annotations

import math
from dataclasses import replace

from vllm_dllm.attention.backend_limits import (
    FLASH_4_TILE,
    OURS,
    candidates_of,
    flash_version,
    obstacle_of_layer,
    page_unit,
)
from vllm_dllm.attention.route_parts import (
    Device,
    ModelAttention,
    Options,
    Route,
    RouteError,
)

DEFAULT_GRAPHS = "FULL_AND_PIECEWISE"


def choose_route(device: Device, model: ModelAttention, asked: Options) -> Route:
    """Choose how a model's masks are computed on a device.

    Raises:
        RouteError: no route can do what was asked for; the message names the option.
    """
    _check_page_size(model, asked)
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
    version = _version_for_all(device, model, asked) if backend == "FLASH_ATTN" else None
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


def _version_for_all(device: Device, model: ModelAttention, asked: Options) -> int | None:
    """The lowest of the versions that the layers use."""
    versions = [flash_version(device, layer.head_size, asked) for layer in model.layers]
    return min((version for version in versions if version is not None), default=None)


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


def _check_page_size(model: ModelAttention, asked: Options) -> None:
    """Refuse pages that split blocks: the prefix cache would return non-final keys and values."""
    length = model.canvas_length
    if model.block_causal and asked.page_size is not None and asked.page_size % length:
        raise RouteError(
            f"block_size={asked.page_size} is not a multiple of the model's block length {length}; "
            f"leave --block-size out or set it to a multiple of {length}"
        )


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
