"""Applies a served model's route to vLLM's configuration and confirms it on the loaded layers.

`attention.routes` chooses the route; this module collects its inputs and applies the choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from vllm_dllm.attention.routes import (
    OURS,
    Device,
    LayerShape,
    ModelAttention,
    Options,
    Route,
    RouteError,
    choose_route,
    graphs_of,
    method_of,
    obstacle_of_layer,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.dllm")


def device_here() -> Device:
    """The device that attention runs on in this process, found without initialising CUDA."""
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON
    from vllm.v1.attention.backends.fa_utils import is_fa_version_supported

    if not current_platform.is_cuda():
        names = {"cpu": current_platform.is_cpu(), "rocm": current_platform.is_rocm()}
        name = next((name for name, holds in names.items() if holds), current_platform.device_type)
        return Device(name, triton=HAS_TRITON)
    capability = current_platform.get_device_capability()
    versions = frozenset(version for version in (2, 3, 4) if is_fa_version_supported(version))
    return Device("cuda", (capability.major, capability.minor), HAS_TRITON, versions)


def asked_of(vllm_config: VllmConfig) -> Options:
    """The options that the user set."""
    attention, cache = vllm_config.attention_config, vllm_config.cache_config
    mode = vllm_config.compilation_config.cudagraph_mode
    return Options(
        backend=None if attention.backend is None else _name(attention.backend.get_class()),
        kv_cache_dtype=cache.cache_dtype,
        graphs=None if mode is None else mode.name,
        page_size=cache.block_size if cache.user_specified_block_size else None,
        flash_version=attention.flash_attn_version,
    )


def apply_route(vllm_config: VllmConfig, model: ModelAttention) -> Route:
    """Choose the route before weights are read, configure vLLM for it, and log it in one line.

    Raises:
        RouteError: no route can do what was asked for; the message names the option.
    """
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    asked, device = asked_of(vllm_config), device_here()
    route = choose_route(device, model, asked)
    logger.info("dllm: attention on %s: %s", device, route)
    vllm_config.attention_config.use_non_causal = True
    if device.platform != "cpu":
        # The CPU platform makes its own choice, and logs that it cannot use any given name.
        vllm_config.attention_config.backend = AttentionBackendEnum[route.backend]
        if asked.graphs not in (None, route.graphs):
            vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode[route.graphs]
    if route.page_size is not None:
        vllm_config.cache_config.block_size = route.page_size
        vllm_config.cache_config.user_specified_block_size = True
    return route


@dataclass(frozen=True)
class LayerBackend:
    """What computes the attention of some layers of a loaded model.

    Attributes:
        name: vLLM's name of the backend.
        flash_version: the version of FlashAttention, or None for other backends.
        shape: the shape of the layers.
    """

    name: str
    flash_version: int | None
    shape: LayerShape

    def __str__(self) -> str:
        version = f" {self.flash_version}" if self.flash_version else ""
        return f"{self.shape}, {self.name}{version}"


def confirm_route(vllm_config: VllmConfig, block_causal: bool, length: int, window: str) -> bool:
    """Check that the layers of a loaded model can express its masks, and limit CUDA graphs.

    Args:
        vllm_config: vLLM's configuration, in the worker.
        block_causal: see `ModelAttention`.
        length: L, tokens of a canvas.
        window: ``dllm.window``.

    Returns:
        Whether the layers use this package's backend, which needs a mask rule for each request.

    Raises:
        RouteError: they cannot; the message names the layers and their backend.
    """
    layers = layer_backends(vllm_config)
    dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
    shapes = tuple(layer.shape for layer in layers)
    model = ModelAttention(block_causal, length, shapes, window, dtype)
    device = device_here()
    method = confirm_layers(layers, device, model, asked_of(vllm_config))
    if layers:
        limit_graphs(vllm_config, device, layers, method, length)
    if method == "canvas rows":
        from vllm.config import get_layers_from_vllm_config
        from vllm.model_executor.layers.attention import Attention

        from vllm_dllm.attention.reference_window import use_reference_window

        use_reference_window(get_layers_from_vllm_config(vllm_config, Attention))
    return method == "rules"


def confirm_layers(
    layers: list[LayerBackend], device: Device, model: ModelAttention, asked: Options
) -> str | None:
    """The method by which the layers that vLLM created receive the masks; None without layers.

    Raises:
        RouteError: a layer cannot express the masks, or only some layers use this package's
            backend.
    """
    for layer in layers:
        why = obstacle_of_layer(layer.name, layer.flash_version, layer.shape, device, model, asked)
        if why is not None:
            raise RouteError(f"--attention-backend: {layer}: {why}; choose another, or none")
    names = {layer.name for layer in layers}
    if OURS in names and len(names) > 1:
        raise RouteError(
            f"--attention-config.backend_per_kind: some layers have attention backend {OURS} "
            f"(vllm-dllm), others {', '.join(sorted(names - {OURS}))}; choose one for all"
        )
    return method_of(layers[0].name, model) if layers else None


def layer_backends(vllm_config: VllmConfig) -> list[LayerBackend]:
    """The different backends of the attention layers that vLLM created."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention import Attention

    found: dict[LayerBackend, None] = {}
    for layer in get_layers_from_vllm_config(vllm_config, Attention).values():
        # Only FlashAttention's layers have versions.
        version = getattr(layer.impl, "vllm_flash_attn_version", None)
        shape = LayerShape(layer.head_size, layer.sliding_window)
        found[LayerBackend(_name(layer.get_attn_backend()), version, shape)] = None
    return list(found)


def _name(backend: Any) -> str:
    """VLLM's name for a backend class; a third party's ``CUSTOM`` gets its module's name added."""
    name: str = backend.get_name()
    ours = backend.__module__ == "vllm_dllm.attention.backend"
    return name if ours or name != OURS else f"{name} of {backend.__module__}"


def limit_graphs(
    vllm_config: VllmConfig,
    device: Device,
    layers: list[LayerBackend],
    method: str | None,
    length: int,
) -> None:
    """Lower vLLM's CUDA graph mode if it is not correct for the route, and log that.

    vLLM may raise the mode to ``FULL`` after `apply_route`: it does so if attention is not split
    out of the compiled graph.
    """
    from vllm.config.compilation import CUDAGraphMode

    compilation = vllm_config.compilation_config
    mode = compilation.cudagraph_mode
    if method is None or device.platform == "cpu" or not mode.has_full_cudagraphs():
        return
    right, why = mode, ""
    for layer in layers:
        if graphs_of(device, layer.name, method, right.name) != right.name:
            why = f"a graph of mode FULL is not right for {method} on {layer.name}"
            piecewise = compilation.splitting_ops_contain_attention()
            right = CUDAGraphMode[f"FULL_{'AND_PIECEWISE' if piecewise else 'DECODE_ONLY'}"]
    scheduler = vllm_config.scheduler_config
    most = scheduler.max_num_batched_tokens // length + scheduler.max_num_seqs
    entries = max(scheduler.max_num_seqs, compilation.max_cudagraph_capture_size or 0)
    version_3 = any(layer.flash_version == 3 for layer in layers)
    if version_3 and method == "virtual sequences" and most > entries:
        why = (
            f"with full graphs FlashAttention 3 keeps {entries} sequences, and a step may have "
            f"{most} blocks; lower --max-num-batched-tokens"
        )
        piecewise = right.has_piecewise_cudagraphs()
        right = CUDAGraphMode.PIECEWISE if piecewise else CUDAGraphMode.NONE
    if right != mode:
        logger.warning("dllm: cudagraph_mode %s becomes %s: %s", mode.name, right.name, why)
        compilation.cudagraph_mode = right
