"""Applies a served model's route to vLLM's configuration.

`attention.routes` chooses the route; this module collects its inputs and applies the choice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from vllm_dllm.attention.routes import (
    OURS,
    Device,
    ModelAttention,
    Options,
    RouteError,
    choose_route,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.dllm")


def device_here() -> Device:
    """The device that attention runs on in this process, found without initialising CUDA."""
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    if not current_platform.is_cuda():
        names = {"cpu": current_platform.is_cpu(), "rocm": current_platform.is_rocm()}
        name = next((name for name, holds in names.items() if holds), current_platform.device_type)
        return Device(name, triton=HAS_TRITON)
    from vllm.v1.attention.backends.fa_utils import is_fa_version_supported

    capability = current_platform.get_device_capability()
    versions = frozenset(version for version in (2, 3, 4) if is_fa_version_supported(version))
    return Device("cuda", (capability.major, capability.minor), HAS_TRITON, versions)


def asked_of(vllm_config: VllmConfig) -> Options:
    """The options that the user set."""
    attention, cache = vllm_config.attention_config, vllm_config.cache_config
    return Options(
        backend=None if attention.backend is None else name_of(attention.backend.get_class()),
        kv_cache_dtype=cache.cache_dtype,
        page_size=cache.block_size if cache.user_specified_block_size else None,
        flash_version=attention.flash_attn_version,
    )


def apply_route(vllm_config: VllmConfig, model: ModelAttention) -> None:
    """Choose the route before weights are read, configure vLLM for it, and log it in one line.

    Raises:
        RouteError: no route can do what was asked for; the message names the option.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if vllm_config.attention_config.backend_per_kind:
        raise RouteError(
            "--attention-config.backend_per_kind: all layers of a diffusion model have the same "
            "attention backend; remove it, or choose one with --attention-backend"
        )
    device = device_here()
    route = choose_route(device, model, asked_of(vllm_config))
    logger.info("dllm: attention on %s: %s", device, route)
    vllm_config.attention_config.use_non_causal = True
    if device.platform != "cpu":
        # The CPU platform makes its own choice, and logs that it cannot use any given name.
        vllm_config.attention_config.backend = AttentionBackendEnum[route.backend]
    if route.page_size is not None:
        vllm_config.cache_config.block_size = route.page_size
        vllm_config.cache_config.user_specified_block_size = True


def has_own_backend(vllm_config: VllmConfig) -> bool:
    """Whether the layers of a loaded model use this package's backend, which takes mask rules."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention import Attention

    layers = get_layers_from_vllm_config(vllm_config, Attention).values()
    return any(name_of(layer.get_attn_backend()) == OURS for layer in layers)


def name_of(backend: Any) -> str:
    """VLLM's name for a backend class; a third party's ``CUSTOM`` gets its module's name added."""
    name: str = backend.get_name()
    ours = backend.__module__ == "vllm_dllm.attention.backend"
    return name if ours or name != OURS else f"{name} of {backend.__module__}"
