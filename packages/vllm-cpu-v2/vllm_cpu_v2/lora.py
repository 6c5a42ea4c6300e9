"""Rows without an adapter, which vLLM's LoRA operators for the CPU give the last adapter's sum.

The index of such a row is -1, which the operators use as it is: as the last one. vLLM avoids that
only where no row of a batch has an adapter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def only_adapted_rows(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let an operator that adds an adapter's product to its output add zero to the other rows.

    Args:
        original: ``bgmv_expand`` or ``bgmv_expand_slice``, by which vLLM's ``sgmv`` operators
            compute. Its inputs are ``[rows, rank]``, its indices int64 ``[rows]``.
    """

    def expand(
        inputs: torch.Tensor,
        lora_b_weights: torch.Tensor,
        output_tensor: torch.Tensor,
        lora_indices_tensor: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        inputs = inputs.masked_fill(lora_indices_tensor[:, None] < 0, 0)
        return original(inputs, lora_b_weights, output_tensor, lora_indices_tensor, *args, **kwargs)

    return expand


def install() -> None:
    """Replace the two operators, by which vLLM's ``sgmv`` operators compute, in this process."""
    from vllm.lora.ops.torch_ops import lora_ops

    for name in ("bgmv_expand", "bgmv_expand_slice"):
        setattr(lora_ops, name, only_adapted_rows(getattr(lora_ops, name)))
