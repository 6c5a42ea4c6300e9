"""Support updates of the weights of unquantized experts while the engine runs."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)


@UnquantizedFusedMoEMethod.register_oot
class RepackingFusedMoEMethod(UnquantizedFusedMoEMethod):
    """vLLM's method for unquantized experts, which here also packs the weights of an update.

    vLLM's kernels for experts on a CPU read weights in a special layout. vLLM's method packs
    weights when it makes the kernel. For an update it copies the weights into the layer as they
    are, and the kernel then reads them as if they were packed.
    """

    def _setup_kernel(self, layer: Any, w13: Any, w2: Any) -> None:
        is_update = self.moe_kernel is not None
        super()._setup_kernel(layer, w13, w2)
        if is_update:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)
