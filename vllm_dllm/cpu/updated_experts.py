"""Unquantized experts whose weights are updated while the engine runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def packing_again(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap `UnquantizedFusedMoEMethod._setup_kernel`, which packs the first weights only.

    vLLM's kernels for experts on a CPU read weights in a layout of their own. The method packs
    weights when it makes the kernel. For an update it copies the weights as they came into the
    layer, and the kernel then reads them as if they were packed.
    """

    def _setup_kernel(self: Any, layer: Any, w13: Any, w2: Any) -> None:
        is_update = self.moe_kernel is not None
        original(self, layer, w13, w2)
        if is_update:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    return _setup_kernel
