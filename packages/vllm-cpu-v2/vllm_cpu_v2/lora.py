"""Fix rows without an adapter, to which vLLM's LoRA operators for the CPU apply the last adapter.

The index of such a row is -1, which the operators use unchanged, so it selects the last adapter.
vLLM avoids that only if no row of a batch has an adapter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def only_adapted_rows(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make an operator that adds an adapter's product to its output add zero to the other rows.

    Args:
        original: ``bgmv_expand`` or ``bgmv_expand_slice``, which vLLM's ``sgmv`` operators call.
            Its inputs are ``[rows, rank]``, its indices int64 ``[rows]``.
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
    """Replace the two operators, which vLLM's ``sgmv`` operators call, in this process."""
    from vllm.lora.ops.torch_ops import lora_ops

    for name in ("bgmv_expand", "bgmv_expand_slice"):
        setattr(lora_ops, name, only_adapted_rows(getattr(lora_ops, name)))
