"""Define plain experts for each quantization scheme, and install them for vLLM's methods."""

from __future__ import annotations

from typing import Any

import torch
from compressed_tensors.quantization import QuantizationStrategy
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w4a4_nvfp4 as nvfp4_module,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w8a8_fp8 as fp8_module,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w8a8_int8 as int8_module,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_wna16 as wna16_module,
)
from vllm.model_executor.layers.quantization.online import base as online_module
from vllm.model_executor.layers.quantization.online import fp8 as online_fp8_module

from vllm_cpu_v2.plain_experts import (
    PlainExpertsFallback,
    Rounding,
    apply_scales,
    e2m1_values,
    fp8_by_tensor,
    fp8_by_token,
    int4_values,
    int8_by_token,
    nvfp4,
    unrounded,
)

Weights = tuple[torch.Tensor, torch.Tensor]


class Int8Experts(PlainExpertsFallback, int8_module.CompressedTensorsW8A8Int8MoEMethod):
    """INT8 weights by channel, INT8 activations by token."""

    def dequantized(self, layer: Any) -> Weights:
        """Values times the channel's scale."""
        return apply_scales(layer.w13_weight, layer.w13_weight_scale), apply_scales(
            layer.w2_weight, layer.w2_weight_scale
        )

    def roundings(self, layer: Any) -> tuple[Rounding, Rounding]:
        """A scale for each token."""
        return int8_by_token, int8_by_token


class Fp8Experts(PlainExpertsFallback, fp8_module.CompressedTensorsW8A8Fp8MoEMethod):
    """FP8 weights by channel, tensor or block; activations by token, or by tensor."""

    def dequantized(self, layer: Any) -> Weights:
        """Values times the scale of the channel, of the block, or of gate, up and down."""
        w13_scale, w2_scale = layer.w13_weight_scale, layer.w2_weight_scale
        if self.weight_quant.strategy == QuantizationStrategy.TENSOR:
            # [experts, 2] and [experts]: one for gates, one for ups, one for downs.
            size = layer.w13_weight.shape[1] // 2
            w13_scale = w13_scale.repeat_interleave(size, dim=1).unsqueeze(-1)
            w2_scale = w2_scale[:, None, None]
        elif self.weight_block_size is not None:
            return tuple(
                _by_block(weight, scale, self.weight_block_size)
                for weight, scale in (
                    (layer.w13_weight, w13_scale),
                    (layer.w2_weight, w2_scale),
                )
            )
        return apply_scales(layer.w13_weight, w13_scale), apply_scales(layer.w2_weight, w2_scale)

    def roundings(self, layer: Any) -> tuple[Rounding, Rounding]:
        """By token, unless the scheme says by tensor; static scales are the experts' largest."""
        if self.input_quant.strategy != QuantizationStrategy.TENSOR:
            return fp8_by_token, fp8_by_token
        if self.input_quant.dynamic:
            return fp8_by_tensor(None), fp8_by_tensor(None)
        return fp8_by_tensor(layer.w13_input_scale.max()), fp8_by_tensor(layer.w2_input_scale.max())


class Nvfp4Experts(PlainExpertsFallback, nvfp4_module.CompressedTensorsW4A4Nvfp4MoEMethod):
    """NVFP4 weights and activations."""

    def dequantized(self, layer: Any) -> Weights:
        """E2M1 values times the group's FP8 scale, over the global scale.

        A checkpoint states global scales as the factors that the weights were multiplied by.
        """
        size = layer.w13_weight_packed.shape[1] // 2
        w13_global = layer.w13_weight_global_scale.repeat_interleave(size, dim=1).unsqueeze(-1)
        w2_global = layer.w2_weight_global_scale[:, None, None]
        return (
            apply_scales(
                e2m1_values(layer.w13_weight_packed), layer.w13_weight_scale.float() / w13_global
            ),
            apply_scales(
                e2m1_values(layer.w2_weight_packed), layer.w2_weight_scale.float() / w2_global
            ),
        )

    def roundings(self, layer: Any) -> tuple[Rounding, Rounding]:
        """One global scale for all experts, the smallest, as vLLM's own kernels take it."""
        if self.use_a16:
            return unrounded, unrounded
        return nvfp4(layer.w13_input_global_scale.min()), nvfp4(layer.w2_input_global_scale.min())


class Int4Experts(PlainExpertsFallback, wna16_module.CompressedTensorsWNA16MoEMethod):
    """INT4 weights by group, activations as they are."""

    def use_plain_experts(self, reason: str) -> None:
        """Also set what the creation of the weights needs.

        Raises:
            NotImplementedError: the weights are not symmetric INT4 by group.
        """
        if self.num_bits != 4 or not self.symmetric or self.strategy != "group":
            raise NotImplementedError(
                f"{self.num_bits}-bit weights by {self.strategy}, symmetric={self.symmetric}: on "
                "this CPU experts can have symmetric 4-bit weights by group only"
            )
        super().use_plain_experts(reason)
        self.is_marlin = self.is_transposed = False

    def dequantized(self, layer: Any) -> Weights:
        """Values of -8 to 7 times the group's scale."""
        return (
            apply_scales(int4_values(layer.w13_weight_packed), layer.w13_weight_scale),
            apply_scales(int4_values(layer.w2_weight_packed), layer.w2_weight_scale),
        )

    def roundings(self, layer: Any) -> tuple[Rounding, Rounding]:
        """There are none, because the scheme quantizes only weights."""
        return unrounded, unrounded


class OnlineFp8Experts(PlainExpertsFallback, online_fp8_module.Fp8PerTensorOnlineMoEMethod):
    """FP8 weights by tensor, made from an unquantized checkpoint; activations by tensor."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Call vLLM's method, which quantizes the weights and then calls `_setup_kernel`."""
        online_fp8_module.Fp8PerTensorOnlineMoEMethod.process_weights_after_loading(self, layer)

    def _setup_kernel(
        self,
        layer: Any,
        w13: torch.Tensor,
        w2: torch.Tensor,
        w13_scale: torch.Tensor,
        w2_scale: torch.Tensor,
        *input_scales: Any,
        **more: Any,
    ) -> None:
        if not self.uses_plain_experts:
            super()._setup_kernel(layer, w13, w2, w13_scale, w2_scale, *input_scales, **more)
            return
        dtype = self.moe.in_dtype
        weights = (
            apply_scales(w13, w13_scale.view(-1, 1, 1)).to(dtype),
            apply_scales(w2, w2_scale.view(-1, 1, 1)).to(dtype),
        )
        self.install_plain_experts(layer, weights, fp8_by_tensor(None), fp8_by_tensor(None))


def _by_block(weight: torch.Tensor, scale: torch.Tensor, block: list[int]) -> torch.Tensor:
    """Float32 weights ``[experts, out, in]``.

    Scales are ``[experts, blocks of out, blocks of in]``.
    """
    rows = scale.float().repeat_interleave(block[0], dim=1)[:, : weight.shape[1]]
    return weight.float() * rows.repeat_interleave(block[1], dim=2)[..., : weight.shape[2]]


_METHODS: tuple[tuple[Any, type], ...] = (
    (int8_module, Int8Experts),
    (fp8_module, Fp8Experts),
    (nvfp4_module, Nvfp4Experts),
    (wna16_module, Int4Experts),
)


def scaled_fp8_quant(
    input: torch.Tensor, scale: torch.Tensor | None = None, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix in FP8 (E4M3) and its single scale.

    It replaces vLLM's function of this name, for which the CPU build has no operator.

    Raises:
        NotImplementedError: scales by row or by group, which quantizing weights does not need.
    """
    if (scale is not None and scale.numel() != 1) or any(options.values()):
        raise NotImplementedError("on this CPU only one scale for a whole tensor")
    if scale is None:
        scale = input.float().abs().max().reshape(1) / 448
    values = (input.float() / scale).clamp(-448, 448)
    return values.to(torch.float8_e4m3fn), scale


def install() -> None:
    """Make vLLM build our methods in this process where it would build its own.

    vLLM looks a method's class up in its module whenever it builds a layer, so the class is
    replaced there. For linear layers vLLM has everything that is needed, but does not offer its
    emulation of NVFP4 on the CPU; this function does. A second call has no effect.
    """
    from vllm import _custom_ops
    from vllm.model_executor.kernels.linear import (
        _POSSIBLE_NVFP4_KERNELS,
        EmulationNvFp4LinearKernel,
        register_linear_kernel,
    )
    from vllm.platforms import PlatformEnum

    for module, method in _METHODS:
        setattr(module, method.__mro__[2].__name__, method)
    for key, method in online_module._ONLINE_MOE_METHODS.items():
        if method is online_fp8_module.Fp8PerTensorOnlineMoEMethod:
            online_module._ONLINE_MOE_METHODS[key] = OnlineFp8Experts
    _custom_ops.scaled_fp8_quant = scaled_fp8_quant
    if not _POSSIBLE_NVFP4_KERNELS.get(PlatformEnum.CPU):
        register_linear_kernel(EmulationNvFp4LinearKernel, PlatformEnum.CPU, "nvfp4")
