"""Plain experts: roundings are the library's, and the sum is what a loop over tokens gives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm_cpu_v2 import quantized_experts
from vllm_cpu_v2.plain_experts import PlainExperts, fp8_by_token, int8_by_token, nvfp4, unrounded

from examples.quantize.files import compressed, scheme_named


def rows(count: int = 7, width: int = 64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, width, generator=generator) * 3


def by_library(scheme: str, x: torch.Tensor) -> torch.Tensor:
    args = scheme_named(scheme).input_activations
    x = x[None]  # the library takes batches of rows
    scale, zero = compute_dynamic_scales_and_zp(x, args, SimpleNamespace())
    return fake_quantize(x, scale, zero, args)[0]


@pytest.mark.parametrize(
    ("scheme", "rounding", "steps"),
    [("int8", int8_by_token, 127), ("fp8-dynamic", fp8_by_token, 8)],
)
def test_rounds_as_the_library(scheme: str, rounding: Any, steps: int) -> None:
    """The library's INT8 scale is the largest magnitude over 127.5, the kernels' over 127."""
    x = rows()
    wanted = by_library(scheme, x)
    largest = x.abs().amax(-1, keepdim=True)
    assert ((rounding(x) - wanted).abs() <= largest / steps).all()
    assert ((rounding(x) - x).abs() <= largest / steps).all()


def test_nvfp4_rounds_to_its_grid() -> None:
    x = rows()
    scale = torch.tensor(448 * 6 / float(x.abs().max()))
    error = (nvfp4(scale)(x.clone()) - x).abs().unflatten(-1, (-1, 16))
    largest = x.abs().unflatten(-1, (-1, 16)).amax(-1, keepdim=True)
    # Between 4 and 6 neighbours are 2 apart; the group's scale is itself rounded to FP8.
    assert (error <= largest / 6 * 1.1 + 1e-6).all()


@pytest.mark.parametrize("activation", [MoEActivation.SILU, MoEActivation.GELU_TANH])
def test_weighted_sum_of_chosen_experts(activation: MoEActivation) -> None:
    torch.manual_seed(0)
    x, w1, w2 = torch.randn(5, 16), torch.randn(3, 8, 16), torch.randn(3, 16, 4)
    ids = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2], [1, 0]])
    weights = torch.rand(5, 2)
    experts = object.__new__(PlainExperts)
    experts.roundings = unrounded, unrounded
    out = torch.empty_like(x)
    experts.apply(out, x, w1, w2, weights, ids, activation)
    silu = activation is MoEActivation.SILU
    for token in range(5):
        wanted = torch.zeros(16)
        for place in range(2):
            gate, up = (w1[ids[token, place]] @ x[token]).chunk(2)
            gate = F.silu(gate) if silu else F.gelu(gate, approximate="tanh")
            wanted += weights[token, place] * (w2[ids[token, place]] @ (gate * up))
        torch.testing.assert_close(out[token], wanted, rtol=1e-4, atol=1e-4)


METHODS = {
    "fp8-dynamic": quantized_experts.Fp8Experts,
    "int8": quantized_experts.Int8Experts,
    "w4a16": quantized_experts.PackedExperts,
    "w4a16-asymmetric": quantized_experts.PackedExperts,
    "w8a16": quantized_experts.PackedExperts,
    "nvfp4": quantized_experts.Nvfp4Experts,
}


@pytest.mark.parametrize("name", list(METHODS))
def test_dequantizes_as_the_library_to_the_bit(name: str) -> None:
    """Float32 weights of three experts, gates before ups, from what a checkpoint holds."""
    scheme = scheme_named(name, 32 if "a16" in name else None)
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    generator = torch.Generator().manual_seed(1)
    held: dict[str, list[dict[str, torch.Tensor]]] = {}
    wanted: dict[str, list[torch.Tensor]] = {}
    for part, shape in (("gate", (64, 96)), ("up", (64, 96)), ("down", (96, 64))):
        for expert in range(3):
            weight = torch.randn(shape, generator=generator) * (expert + 1)
            known = {"input_global_scale": torch.ones(1)} if name == "nvfp4" else {}
            largest = torch.tensor(9.0 * (expert + 1))
            state = compressed(f"{expert}.{part}", weight, scheme, largest, known)
            held.setdefault(part, []).append(state)
            wanted.setdefault(part, []).append(compressor.decompress(state, scheme)["weight"])

    def stacked(part: str, tensor: str) -> torch.Tensor:
        return torch.stack([state[tensor] for state in held[part]])

    layer = SimpleNamespace()
    for tensor in held["gate"][0]:
        alone = tensor.endswith("global_scale")
        first = [stacked("gate", tensor), stacked("up", tensor)]
        setattr(layer, f"w13_{tensor}", torch.cat(first, dim=1))
        down = stacked("down", tensor)
        setattr(layer, f"w2_{tensor}", down[:, 0] if alone else down)
    method = object.__new__(METHODS[name])
    method.weight_quant, method.weight_block_size = scheme.weights, None
    method.num_bits, method.symmetric = scheme.weights.num_bits, scheme.weights.symmetric
    w13, w2 = method.dequantized(layer)
    for expert in range(3):
        both = torch.cat([wanted["gate"][expert], wanted["up"][expert]])
        down = wanted["down"][expert]
        # The library returns NVFP4 in bfloat16, everything else in float32.
        assert torch.equal(w13[expert].to(both.dtype), both)
        assert torch.equal(w2[expert].to(down.dtype), down)
