"""Linear layers of packed integers that vLLM's kernel for a CPU cannot multiply with.

That kernel takes 4-bit weights, sides that are multiples of 32, and 16-bit activations, of which it
checks all but the last. The weights of other layers are dequantized to the model's dtype once, when
they are loaded, and take as much memory as in an unquantized checkpoint.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from vllm.logger import init_logger
from vllm.model_executor.kernels.linear.mixed_precision.cpu import CPUWNA16LinearKernel
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import (
    MPLinearKernel,
    MPLinearLayerConfig,
)

from vllm_cpu_v2.plain_experts import integers, unsigned_values

logger = init_logger("vllm.cpu_v2")


class PlainIntegerLinearKernel(MPLinearKernel):
    """Weights of 2, 4 or 8 bits by group or channel, with or without zero points."""

    @classmethod
    def get_min_capability(cls) -> int:
        """Any processor."""
        return -1

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        """Whatever vLLM's own kernel cannot multiply with, unless a value spans two words."""
        if 32 % c.weight_type.size_bits:
            return False, f"values of {c.weight_type.size_bits} bits span words"
        if c.act_type != torch.float32 and CPUWNA16LinearKernel.can_implement(c)[0]:
            return False, "vLLM has a kernel"
        return True, None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace the packed parameters by a matrix ``[out, in]`` in the model's dtype."""
        packed, scale, zeros = self._get_weight_params(layer)
        kind = self.config.weight_type
        # Compressed-tensors has the outputs first; what was GPTQ's or AWQ's has the inputs first,
        # but for zero points.
        values = unsigned_values(packed if packed.input_dim == 1 else packed.t(), kind.size_bits)
        scale = scale if scale.output_dim == 0 else scale.t()
        zero: Any = kind.bias
        if self.config.zero_points:
            assert zeros is not None and zeros.output_dim == 0
            zero = unsigned_values(zeros.t(), kind.size_bits).t()
        weight = integers(values, zero, scale).to(self.config.act_type)
        for name in (self.w_q_name, self.w_s_name, self.w_zp_name):
            if name is not None:
                setattr(layer, name, None)
        layer.plain_weight = torch.nn.Parameter(weight, requires_grad=False)
        logger.warning_once(
            "vLLM has no kernel for %s weights in groups of %d with %s activations on this CPU: "
            "they are dequantized when they are loaded",
            kind,
            self.config.group_size,
            self.config.act_type,
        )

    def apply_weights(
        self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The product with the dequantized weights."""
        return F.linear(x, layer.plain_weight, bias)
