"""Define plain experts for each quantization scheme, and install them for vLLM's methods."""

from __future__ import annotations

from typing import Any

import torch
from compressed_tensors.quantization import QuantizationStrategy
from vllm.model_executor.layers.fusion import fused_act_quant
from vllm.model_executor.layers.quantization import auto_awq, auto_gptq, modelopt
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
    int8_by_token,
    integers,
    nvfp4,
    unrounded,
    unsigned_values,
    vllm_class,
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
        if self.weight_quant.strategy == QuantizationStrategy.TENSOR:
            return fp8_of_tensors(layer)
        w13_scale, w2_scale = layer.w13_weight_scale, layer.w2_weight_scale
        if self.weight_block_size is not None:
            block = self.weight_block_size
            w13 = _by_block(layer.w13_weight, w13_scale, block)
            return w13, _by_block(layer.w2_weight, w2_scale, block)
        return apply_scales(layer.w13_weight, w13_scale), apply_scales(layer.w2_weight, w2_scale)

    def roundings(self, layer: Any) -> tuple[Rounding, Rounding]:
        """By token, unless the scheme says by tensor; static scales are the experts' largest."""
        if self.input_quant.strategy != QuantizationStrategy.TENSOR:
            return fp8_by_token, fp8_by_token
        if self.input_quant.dynamic:
            return fp8_by_tensor(None), fp8_by_tensor(None)
        return static_fp8(layer)


class ModelOptFp8Experts(PlainExpertsFallback, modelopt.ModelOptFp8MoEMethod):
    """FP8 weights and activations by tensor, with static scales."""

    def dequantized(self, layer: Any) -> Weights:
        """Values times the scale of gate, up or down."""
        return fp8_of_tensors(layer)

    def roundings(self, layer: Any) -> tuple[Rounding, Rounding]:
        """The experts' largest scales."""
        return static_fp8(layer)


class Nvfp4Experts(PlainExpertsFallback, nvfp4_module.CompressedTensorsW4A4Nvfp4MoEMethod):
    """NVFP4 weights and activations."""

    def dequantized(self, layer: Any) -> Weights:
        """E2M1 values times the group's FP8 scale, over the global scale.

        A checkpoint states global scales as the factors that the weights were multiplied by.
        """
        return (
            apply_scales(
                e2m1_values(layer.w13_weight_packed),
                layer.w13_weight_scale.float() / of_halves(layer.w13_weight_global_scale, layer),
            ),
            apply_scales(
                e2m1_values(layer.w2_weight_packed),
                layer.w2_weight_scale.float() / layer.w2_weight_global_scale[:, None, None],
            ),
        )

    def roundings(self, layer: Any) -> tuple[Rounding, Rounding]:
        """One global scale for all experts, the smallest, as vLLM's own kernels take it."""
        if self.use_a16:
            return unrounded, unrounded
        return nvfp4(layer.w13_input_global_scale.min()), nvfp4(layer.w2_input_global_scale.min())


class ModelOptNvfp4Experts(PlainExpertsFallback, modelopt.ModelOptNvFp4FusedMoE):
    """NVFP4 weights and activations, in ModelOpt's names: its global scales are to multiply by."""

    # Only a kernel of vLLM's wants the scales of experts that are elsewhere.
    use_global_sf = False

    def dequantized(self, layer: Any) -> Weights:
        """E2M1 values times the group's FP8 scale and the global scale."""
        return (
            apply_scales(
                e2m1_values(layer.w13_weight),
                layer.w13_weight_scale.float() * of_halves(layer.w13_weight_scale_2, layer),
            ),
            apply_scales(
                e2m1_values(layer.w2_weight),
                layer.w2_weight_scale.float() * layer.w2_weight_scale_2[:, None, None],
            ),
        )

    def roundings(self, layer: Any) -> tuple[Rounding, Rounding]:
        """One global scale for all experts, the largest, as vLLM's own kernels take it."""
        if self.use_a16:
            return unrounded, unrounded
        return nvfp4(1 / layer.w13_input_scale.max()), nvfp4(1 / layer.w2_input_scale.max())


class IntegerExperts(PlainExpertsFallback):
    """INT4 or INT8 weights by group or channel, activations as they are."""

    def roundings(self, layer: Any) -> tuple[Rounding, Rounding]:
        """There are none, because the scheme quantizes only weights."""
        return unrounded, unrounded


class PackedExperts(IntegerExperts, wna16_module.CompressedTensorsWNA16MoEMethod):
    """Compressed-tensors' integers, packed along the inputs; zero points along the outputs."""

    def use_plain_experts(self, reason: str) -> None:
        """Also set what the creation of the weights needs."""
        super().use_plain_experts(reason)
        self.is_marlin = self.is_transposed = False

    def dequantized(self, layer: Any) -> Weights:
        """Values less the zero point, times the scale of the group or channel."""
        return tuple(self._matrices(layer, name) for name in ("w13", "w2"))  # type: ignore[return-value]

    def _matrices(self, layer: Any, name: str) -> torch.Tensor:
        values = unsigned_values(getattr(layer, f"{name}_weight_packed"), self.num_bits)
        zero: Any = 1 << (self.num_bits - 1)
        if not self.symmetric:
            packed = getattr(layer, f"{name}_weight_zero_point")
            zero = unsigned_values(packed.mT, self.num_bits).mT
        return integers(values, zero, getattr(layer, f"{name}_weight_scale"))


class GptqExperts(IntegerExperts, auto_gptq.AutoGPTQMoEMethod):
    """GPTQ's symmetric integers ``[experts, in, out]``, packed along the inputs."""

    def dequantized(self, layer: Any) -> Weights:
        """Values less half their range, times the scale of the group."""
        bits = self.quant_config.weight_bits
        return tuple(
            integers(unsigned_values(packed.mT, bits), 1 << (bits - 1), scales.mT)
            for packed, scales in (
                (layer.w13_qweight, layer.w13_scales),
                (layer.w2_qweight, layer.w2_scales),
            )
        )  # type: ignore[return-value]


class AwqExperts(IntegerExperts, auto_awq.AutoAWQMoEMethod):
    """AWQ's integers ``[experts, in, out]``, packed along the outputs in an order of its own."""

    def dequantized(self, layer: Any) -> Weights:
        """Values less the zero point of the group, times its scale."""
        return tuple(
            integers(awq_values(packed).mT, awq_values(zeros).mT, scales.mT)
            for packed, zeros, scales in (
                (layer.w13_qweight, layer.w13_qzeros, layer.w13_scales),
                (layer.w2_qweight, layer.w2_qzeros, layer.w2_scales),
            )
        )  # type: ignore[return-value]


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


def of_halves(scale: torch.Tensor, layer: Any) -> torch.Tensor:
    """Scales of gates and ups ``[experts, 2]`` for each output: ``[experts, 2 * size, 1]``."""
    weight = layer.w13_weight if hasattr(layer, "w13_weight") else layer.w13_weight_packed
    return scale.repeat_interleave(weight.shape[1] // 2, dim=1).unsqueeze(-1)


def fp8_of_tensors(layer: Any) -> Weights:
    """FP8 values times their scales: one for gates, one for ups, one for downs of each expert."""
    return (
        apply_scales(layer.w13_weight, of_halves(layer.w13_weight_scale, layer)),
        apply_scales(layer.w2_weight, layer.w2_weight_scale[:, None, None]),
    )


def static_fp8(layer: Any) -> tuple[Rounding, Rounding]:
    """The roundings of static scales: the experts' largest, as vLLM's own kernels take them."""
    return fp8_by_tensor(layer.w13_input_scale.max()), fp8_by_tensor(layer.w2_input_scale.max())


def awq_values(packed: torch.Tensor) -> torch.Tensor:
    """Unpack the last dimension of AWQ's words, which hold the outputs 0, 2, 4, 6, 1, 3, 5, 7."""
    order = [0, 4, 1, 5, 2, 6, 3, 7]
    return unsigned_values(packed, 4).unflatten(-1, (-1, 8))[..., order].flatten(-2)


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
    (wna16_module, PackedExperts),
    (modelopt, ModelOptFp8Experts),
    (modelopt, ModelOptNvfp4Experts),
    (auto_gptq, GptqExperts),
    (auto_awq, AwqExperts),
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
    replaced there. For linear layers vLLM does not offer its emulation of NVFP4 on the CPU, and its
    kernel for integers takes few of them; this function adds both. A second call has no effect.
    """
    from vllm import _custom_ops
    from vllm.model_executor.kernels.linear import (
        _POSSIBLE_KERNELS,
        _POSSIBLE_NVFP4_KERNELS,
        EmulationNvFp4LinearKernel,
        register_linear_kernel,
    )
    from vllm.platforms import PlatformEnum

    from vllm_cpu_v2.plain_linear import PlainIntegerLinearKernel

    # vLLM's fused activations are operators that its CPU build lacks; without, it runs them apart.
    fused_act_quant._FUSED_ACT_QUANT.clear()
    for module, method in _METHODS:
        setattr(module, vllm_class(method).__name__, method)
    modelopt.ModelOptFp8Config.FusedMoEMethodCls = ModelOptFp8Experts
    modelopt.ModelOptNvFp4Config.FusedMoEMethodCls = ModelOptNvfp4Experts
    for key, method in online_module._ONLINE_MOE_METHODS.items():
        if method is online_fp8_module.Fp8PerTensorOnlineMoEMethod:
            online_module._ONLINE_MOE_METHODS[key] = OnlineFp8Experts
    _custom_ops.scaled_fp8_quant = scaled_fp8_quant
    if not _POSSIBLE_NVFP4_KERNELS.get(PlatformEnum.CPU):
        register_linear_kernel(EmulationNvFp4LinearKernel, PlatformEnum.CPU, "nvfp4")
    if PlainIntegerLinearKernel not in _POSSIBLE_KERNELS[PlatformEnum.CPU]:
        _POSSIBLE_KERNELS[PlatformEnum.CPU].insert(0, PlainIntegerLinearKernel)
