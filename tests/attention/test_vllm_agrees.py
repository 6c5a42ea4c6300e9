"""Routes on CUDA against vLLM's own rules: its backends take what was chosen, in that version."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.routes import DEVICES, GEMMA, GEMMA_REFERENCE, LLADA2, cuda
from vllm_dllm.attention.routes import (
    Device,
    LayerShape,
    ModelAttention,
    Options,
    RouteError,
    choose_route,
    flash_version,
)

ON_CUDA = {name: device for name, device in DEVICES.items() if device.platform == "cuda"}
ON_CUDA |= {"SM90 without 4": cuda(9, 0, 2, 3), "SM100 without 4": cuda(10, 0, 2)}
MODELS = (LLADA2, GEMMA, GEMMA_REFERENCE, replace(LLADA2, dtype="float32"))
BACKENDS = (None, "FLASH_ATTN", "TRITON_ATTN", "CUSTOM")
KV_CACHE_DTYPES = ("auto", "bfloat16", "fp8", "fp8_e5m2")


@pytest.fixture
def vllm_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Let vLLM's rules see a device, and a diffusion model with what was asked for."""
    import vllm.config
    import vllm.v1.attention.backends.fa_utils as fa_utils
    import vllm.v1.attention.backends.flash_attn as flash_attn
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability

    # A CPU build has no kernels of FlashAttention, and its package does not load without them.
    interface = ModuleType("vllm.vllm_flash_attn.flash_attn_interface")
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn", ModuleType("vllm.vllm_flash_attn"))
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    platform = type(current_platform)

    def see(device: Device, model: ModelAttention, asked: Options) -> DeviceCapability:
        assert device.capability is not None
        capability = DeviceCapability(*device.capability)
        text = SimpleNamespace(attn_logit_softcapping=None)
        config = SimpleNamespace(
            attention_config=SimpleNamespace(flash_attn_version=asked.flash_version),
            cache_config=SimpleNamespace(cache_dtype=asked.kv_cache_dtype),
            parallel_config=SimpleNamespace(decode_context_parallel_size=1),
            model_config=SimpleNamespace(
                is_diffusion=True,
                is_mm_prefix_lm=False,
                rswa_window=None,
                hf_text_config=text,
                get_head_size=lambda: model.layers[0].head_size,
            ),
        )
        monkeypatch.setattr(platform, "is_cuda", lambda self: True)
        monkeypatch.setattr(platform, "is_cpu", lambda self: False)
        monkeypatch.setattr(
            platform, "get_device_capability", classmethod(lambda cls, device_id=0: capability)
        )
        vars(interface).update(
            is_fa_version_supported=device.flash_versions.__contains__,
            fa_version_unsupported_reason=lambda version: f"{version} is not there",
        )
        for module in (vllm.config, fa_utils, flash_attn):
            monkeypatch.setattr(
                module, "get_current_vllm_config_or_none", lambda: config, raising=False
            )
        return capability

    yield see


def reasons_against(backend: Any, capability: Any, layer: LayerShape, **more: Any) -> list[str]:
    """What vLLM's selector says against a backend for one layer of a model."""
    return backend.validate_configuration(
        head_size=layer.head_size,
        use_mla=False,
        has_sink=False,
        use_sparse=False,
        use_per_head_quant_scales=False,
        device_capability=capability,
        attn_type="decoder",
        has_sliding_window=layer.window is not None,
        use_non_causal=True,
        **more,
    )


@pytest.mark.parametrize("name", ON_CUDA)
def test_vllm_takes_every_route(name: str, vllm_on: Any) -> None:
    """Also with images, whose attention vLLM asks of every backend of DiffusionGemma."""
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from vllm_dllm.attention.backend import MaskAttentionBackend

    device, taken = ON_CUDA[name], 0
    for model, backend, kv in itertools.product(MODELS, BACKENDS, KV_CACHE_DTYPES):
        asked = Options(backend, kv)
        capability = vllm_on(device, model, asked)
        for layer in model.layers:
            vllms = get_flash_attn_version(
                head_size=layer.head_size, head_size_v=layer.head_size, supports_fa4_hd256=True
            )
            assert flash_version(device, asked) == vllms or (name == "SM100" and model != LLADA2)
        try:
            route = choose_route(device, model, asked)
        except RouteError:
            continue
        taken += 1
        enum = AttentionBackendEnum[route.backend]
        chosen = MaskAttentionBackend if route.backend == "CUSTOM" else enum.get_class()
        for layer in model.layers:
            assert not reasons_against(
                chosen,
                capability,
                layer,
                dtype=getattr(torch, model.dtype),
                kv_cache_dtype=kv,
                block_size=route.page_size,
                use_mm_prefix=not model.block_causal,
            ), (route, layer)
    assert taken > 10
