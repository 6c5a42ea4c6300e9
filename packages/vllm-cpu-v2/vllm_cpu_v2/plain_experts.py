"""Run quantized experts for which vLLM has no kernel on a CPU.

vLLM's own methods make and load the parameters of quantized experts on every platform. Its CPU
build lacks kernels that multiply with them: on x86, the kernels for INT8, FP8 and INT4 experts need
AMX tiles and support few activations and routers, and the emulation of NVFP4 is written in Triton.

If vLLM finds a kernel, that kernel is used. Otherwise the classes below dequantize the weights to
the model's dtype once, when they are loaded, and round the inputs of each product as the scheme's
kernels on a GPU do. The weights of the experts then take as much memory as in an unquantized
checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import modular_kernel as mk
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP

logger = init_logger("vllm.cpu_v2")

# Rounds rows [tokens, channels] as a quantization scheme does; keeps shape and dtype.
Rounding = Callable[[torch.Tensor], torch.Tensor]

_ACTIVATIONS: dict[MoEActivation, Callable[[torch.Tensor], torch.Tensor]] = {
    MoEActivation.SILU: F.silu,
    MoEActivation.GELU: F.gelu,
    MoEActivation.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
}


class PlainExperts(mk.FusedMoEExpertsModular):
    """Experts in plain PyTorch, one after another, with rounded inputs to both products.

    `first` and `second` round the inputs of the first and of the second product.
    """

    def __init__(self, moe_config: Any, first: Rounding, second: Rounding) -> None:
        super().__init__(moe_config, FusedMoEQuantConfig.make())
        self.roundings = first, second

    @property
    def expects_unquantized_inputs(self) -> bool:
        """True, because `apply` rounds the rows, and vLLM must not round them before."""
        return True

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        """The layout of the activations: one row per token."""
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device() -> bool:
        return True

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return True

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation in _ACTIVATIONS

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return True

    def workspace_shapes(self, M: int, N: int, K: int, *rest: Any) -> tuple[Any, ...]:  # noqa: N803
        """There is no workspace; the output is ``[M, K]``, one row for each token."""
        return (0,), (0,), (M, K)

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        """`apply` weights and sums the experts itself."""
        return TopKWeightAndReduceNoOP()

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: MoEActivation,
        *rest: Any,
        expert_map: torch.Tensor | None = None,
        apply_router_weight_on_input: bool = False,
        **unused: Any,
    ) -> None:
        """Write the weighted sum of the chosen experts to `output` ``[tokens, hidden]``.

        `w1` is ``[experts, 2 * size, hidden]``, gates before ups, and `w2`
        ``[experts, hidden, size]``.
        """
        first, second = self.roundings
        activate = _ACTIVATIONS[activation]
        ids = topk_ids if expert_map is None else expert_map[topk_ids]
        rows = first(hidden_states)
        total = torch.zeros(output.shape, dtype=torch.float32)
        for expert in ids[ids >= 0].unique().tolist():
            token, place = torch.where(ids == expert)
            gate, up = F.linear(rows[token], w1[expert]).chunk(2, dim=-1)
            out = F.linear(second(activate(gate) * up), w2[expert]).float()
            if not apply_router_weight_on_input:
                out *= topk_weights[token, place, None]
            total.index_add_(0, token, out)
        output.copy_(total)


def unrounded(rows: torch.Tensor) -> torch.Tensor:
    """No rounding, for schemes that quantize only weights."""
    return rows


def int8_by_token(rows: torch.Tensor) -> torch.Tensor:
    """Symmetric INT8 with a scale for each row: its largest magnitude over 127."""
    scale = rows.float().abs().amax(-1, keepdim=True).clamp(min=1e-10) / 127
    return ((rows.float() / scale).round().clamp(-128, 127) * scale).to(rows.dtype)


def fp8_by_token(rows: torch.Tensor) -> torch.Tensor:
    """FP8 (E4M3) with a scale for each row: its largest magnitude over 448."""
    return _fp8(rows, rows.float().abs().amax(-1, keepdim=True) / 448)


def fp8_by_tensor(scale: torch.Tensor | None) -> Rounding:
    """FP8 (E4M3) with one scale for all rows: `scale`, or their largest magnitude over 448."""

    def rounded(rows: torch.Tensor) -> torch.Tensor:
        return _fp8(rows, rows.float().abs().max() / 448 if scale is None else scale)

    return rounded


def _fp8(rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    scale = scale.clamp(min=1 / (448 * 512))
    small = (rows.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return (small.float() * scale).to(rows.dtype)


def nvfp4(global_scale: torch.Tensor) -> Rounding:
    """NVFP4: E2M1 in groups of 16, an FP8 scale for each, and one static global scale."""
    from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import (
        ref_nvfp4_quant_dequant,
    )

    def rounded(rows: torch.Tensor) -> torch.Tensor:
        return ref_nvfp4_quant_dequant(rows, global_scale, block_size=16)

    return rounded


def apply_scales(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Float32 weights ``[experts, out, in]``; scales are ``[experts, out or 1, groups or 1]``."""
    groups = scale.shape[-1]
    grouped = weight.float().unflatten(-1, (groups, -1))
    return (grouped * scale.float().unsqueeze(-1)).flatten(-2)


def unsigned_values(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack the words of the last dimension: int32 ``[..., n * bits / 32]`` to int32 ``[..., n]``.

    The first value is in the lowest bits.
    """
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((packed.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(-2)


def integers(values: torch.Tensor, zero: Any, scale: torch.Tensor) -> torch.Tensor:
    """Float32 weights ``[..., out, in]`` of unsigned integers, zero points and scales by group.

    `zero` is a number, or has the shape of `scale`, ``[..., out, groups]``.
    """
    grouped = values.unflatten(-1, (scale.shape[-1], -1))
    if isinstance(zero, torch.Tensor):
        zero = zero.unsqueeze(-1)
    return ((grouped - zero).float() * scale.float().unsqueeze(-1)).flatten(-2)


def e2m1_values(packed: torch.Tensor) -> torch.Tensor:
    """Unpack uint8 ``[experts, out, in / 2]`` to float32 ``[experts, out, in]``.

    The first input is in the low half of a byte.
    """
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    table = torch.cat([magnitudes, -magnitudes])
    halves = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    return table[halves.long()]


def vllm_class(method: type) -> type:
    """The class of vLLM's that an experts method of ours is derived from."""
    return next(base for base in method.__mro__ if base.__module__.startswith("vllm."))


class PlainExpertsFallback:
    """A mixin for vLLM's quantized experts methods that uses plain experts if there is no kernel.

    A method that has found a kernel works as it does in vLLM.
    """

    uses_plain_experts = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        try:
            super().__init__(*args, **kwargs)
        except NotImplementedError as reason:
            # The search for a kernel is the last thing that these constructors do.
            self.use_plain_experts(str(reason))
        else:
            if self.experts_cls is None:
                self.use_plain_experts("no kernel for the CPU")

    def use_plain_experts(self, reason: str) -> None:
        """Set what the constructor would have set after its search, and log a warning."""
        self.uses_plain_experts = True
        self.experts_cls = PlainExperts
        logger.warning_once(
            "%s on this CPU: %s; experts are dequantized when they are loaded and take the "
            "memory of unquantized ones",
            vllm_class(type(self)).__name__,
            reason.splitlines()[0],
        )

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Dequantize, unless vLLM has a kernel."""
        if not self.uses_plain_experts:
            super().process_weights_after_loading(layer)  # type: ignore[misc]
            return
        dtype = self.moe.in_dtype  # type: ignore[attr-defined]
        w13, w2 = (weight.to(dtype) for weight in self.dequantized(layer))
        first, second = self.roundings(layer)
        self.install_plain_experts(layer, (w13, w2), first, second)

    def install_plain_experts(
        self,
        layer: torch.nn.Module,
        weights: tuple[torch.Tensor, torch.Tensor],
        first: Rounding,
        second: Rounding,
    ) -> None:
        """Replace the layer's quantized weights by plain ones, and its kernel by plain experts."""
        for name in [name for name in layer._parameters if name.startswith(("w13_", "w2_"))]:
            delattr(layer, name)
        for name, weight in zip(("w13_weight", "w2_weight"), weights, strict=True):
            layer.register_parameter(name, torch.nn.Parameter(weight, requires_grad=False))
        moe = self.moe  # type: ignore[attr-defined]
        experts = PlainExperts(moe, first, second)
        self.moe_quant_config = experts.quant_config
        prepare = maybe_make_prepare_finalize(
            moe=moe,
            quant_config=experts.quant_config,
            routing_tables=layer._expert_routing_tables(),  # type: ignore[operator]
            allow_new_interface=True,
            use_monolithic=False,
        )
        self.moe_kernel = mk.FusedMoEKernel(prepare, experts)
        _call_as_one_operator(str(layer.layer_name))

    def dequantized(self, layer: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        """Float32 weights of both products, from the loaded parameters."""
        raise NotImplementedError

    def roundings(self, layer: torch.nn.Module) -> tuple[Rounding, Rounding]:
        """The roundings of the inputs of the first and the second product."""
        raise NotImplementedError


def _call_as_one_operator(layer_name: str) -> None:
    """Make a compiled model call these experts as one operator.

    The compiler cannot trace a loop over the experts that were chosen. vLLM has such operators and
    uses them on every platform but the CPU, whose own experts the compiler can trace.
    """
    runner = get_current_vllm_config().compilation_config.static_forward_context[layer_name]
    ops = torch.ops.vllm
    shares = runner._shared_experts is not None
    runner._forward_entry = ops.moe_forward_shared if shares else ops.moe_forward
