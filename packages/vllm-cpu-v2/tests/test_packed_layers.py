"""What vLLM's kernels on a CPU have packed is read back bit by bit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import vllm._C  # noqa: F401
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor import parameter
from vllm.model_executor.layers.linear import MergedColumnParallelLinear
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm_cpu_v2.packed_layers import packed_values, unpacked

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def layer_of(isa: str) -> SimpleNamespace:
    """Experts whose kernel is for these instructions."""
    kernel = SimpleNamespace(fused_experts=SimpleNamespace(isa=isa))
    return SimpleNamespace(quant_method=SimpleNamespace(moe_kernel=kernel))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(8, 64, 128), (3, 192, 32)])
@pytest.mark.parametrize("isa", ["vec", "amx"])
def test_experts(shape: tuple[int, int, int], dtype: torch.dtype, isa: str) -> None:
    if isa == "amx" and not (torch.cpu._is_amx_tile_supported() and dtype == torch.bfloat16):
        pytest.skip("this kernel needs AMX and bfloat16")
    weight = torch.randn(shape).to(dtype)
    packed = cpu_prepack_moe_weight(weight, isa)
    assert not torch.equal(packed.view_as(weight), weight)
    for name in ("w13_weight", "w2_weight"):
        assert torch.equal(packed_values(layer_of(isa), name, packed, weight), weight)


def test_padded_experts() -> None:
    """Channels of 24 become 32, those of gates and of ups for themselves."""
    gate, up, down = torch.randn(2, 24, 64), torch.randn(2, 24, 64), torch.randn(2, 64, 24)
    pad = torch.zeros(2, 8, 64)
    both = torch.cat([gate, pad, up, pad], 1)
    wide = torch.cat([down, pad.mT], 2)
    for name, padded, plain in (
        ("w13_weight", both, torch.cat([gate, up], 1)),
        ("w2_weight", wide, down),
    ):
        packed = cpu_prepack_moe_weight(padded.contiguous(), "vec")
        assert torch.equal(packed_values(layer_of("vec"), name, packed, plain), plain)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(8, 128), (3, 100), (320, 128), (1024, 768)])
def test_matrices(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Small ones and large ones, which vLLM packs for different kernels."""
    layer = torch.nn.Linear(shape[1], shape[0], bias=False, dtype=dtype)
    weight = layer.weight.data.clone()
    dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    if dtype == torch.float16 and layer.weight.numel():
        pytest.skip("vLLM packs no float16 matrices on this processor")
    assert layer.weight.numel() == 0
    assert torch.equal(packed_values(layer, "weight", layer.weight, weight), weight)


def test_a_layer_is_updated_in_part_after_a_reload(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader that vLLM recorded is wrapped by then, and would drop what comes."""
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_world_size", lambda: 1)
    model = torch.nn.Sequential()
    with set_current_vllm_config(VllmConfig()):
        layer = MergedColumnParallelLinear(64, [32, 32], bias=False, disable_tp=True)
        model.append(layer)
        record_metadata_for_reloading(model)
        x, new = torch.randn(5, 64), torch.randn(2, 32, 64)
        with torch.no_grad():
            layer.weight.zero_()
        layer.quant_method.process_weights_after_loading(layer)
        assert layer.weight.numel() == 0
        initialize_layerwise_reload(model)
        for part in range(2):
            layer.weight.weight_loader(layer.weight, torch.ones(32, 64), part)
        finalize_layerwise_reload(model, None)
        for part in (1, 0):
            with unpacked(model):
                layer.weight.weight_loader(layer.weight, new[part], part)
        torch.testing.assert_close(layer(x)[0], x @ new.flatten(0, 1).T)
