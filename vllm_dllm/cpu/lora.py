"""LoRA on the CPU: requests without an adapter get none.

vLLM's operators for the CPU choose each token's adapter by indexing the stack of adapters with its
number, and -1 means none. But -1 is also the last one of the stack, so in a batch with adapters the
other requests would get whatever is there.
"""

from __future__ import annotations

from typing import Any

import torch


def leave_others_alone() -> None:
    """Let the first product of an adapter be zero for tokens that have none; may be repeated."""
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    shrink: Any = lora_ops.bgmv_shrink
    if hasattr(shrink, "__wrapped__"):
        return

    def bgmv_shrink(
        inputs: torch.Tensor,
        lora_a_weights: torch.Tensor,
        output_tensor: torch.Tensor,
        lora_indices_tensor: torch.Tensor,
        scaling: float = 1.0,
    ) -> None:
        """As vLLM's; all have a row for each token, `lora_indices_tensor` is int ``[tokens]``."""
        shrink(inputs, lora_a_weights, output_tensor, lora_indices_tensor, scaling)
        output_tensor.masked_fill_((lora_indices_tensor < 0)[:, None], 0)

    bgmv_shrink.__wrapped__ = shrink  # type: ignore[attr-defined]
    # The operators for prompts call it by its name in their own module.
    lora_ops.bgmv_shrink = punica_cpu.bgmv_shrink = bgmv_shrink
