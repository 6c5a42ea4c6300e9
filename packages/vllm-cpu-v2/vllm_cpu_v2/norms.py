"""RMSNorm in one pass on the CPU: compiled kernels that vLLM's CPU build has but does not use.

vLLM's registry of operators offers these kernels only on GPUs. On the CPU a norm consists of six
elementwise operators, and a denoise step of DiffusionGemma has seventy norms. A compiled model
fuses the six operators by itself, so this is for eager models. It is for float32 only, because in
bfloat16 the kernel rounds once where the models' authors round twice.

Importing this module registers the norms with vLLM's operators.
"""

from __future__ import annotations

import torch
from vllm import ir

PROVIDER = "cpu_v2"
OPERATORS = ("rms_norm", "fused_add_rms_norm")


def _supports(x: torch.Tensor, weight: torch.Tensor | None, variance_size: int | None) -> bool:
    plain = variance_size is None and x.dtype == torch.float32
    return plain and (weight is None or weight.dtype == x.dtype)


def _norm_supports(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    return _supports(x, weight, variance_size)


def _add_norm_supports(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    return _supports(x, weight, variance_size) and x.is_contiguous() and x_residual.is_contiguous()


def _norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> torch.Tensor:
    # Queries and keys are strided views of a fused projection, but the kernel takes no strides.
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    torch.ops._C.rms_norm(out, rows, weight, epsilon)
    return out.view(x.shape)


def _add_norm(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual


ir.ops.rms_norm.register_impl(PROVIDER, supports_args=_norm_supports)(_norm)
ir.ops.fused_add_rms_norm.register_impl(PROVIDER, supports_args=_add_norm_supports, inplace=True)(
    _add_norm
)
