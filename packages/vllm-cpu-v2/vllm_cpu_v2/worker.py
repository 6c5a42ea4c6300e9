"""The CPU worker, with what Model Runner V2 launches and calls.

The platform's configuration names it, so it is imported after vLLM has loaded plugins in the
worker's process and before a runner is made. Other modules are imported only where they are needed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from vllm.config import CompilationMode
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.triton_utils import HAS_TRITON
from vllm.v1.worker import gpu_worker
from vllm.v1.worker.cpu_worker import CPUWorker

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class CpuV2Worker(CPUWorker):
    """vLLM's CPU worker, for a model of Model Runner V2."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        """Register the norms that the platform has chosen, which vLLM's constructor looks up."""
        if "cpu_v2" in vllm_config.kernel_config.ir_op_priority.rms_norm:
            importlib.import_module("vllm_cpu_v2.norms")
        # vLLM 0.33 asks for Triton here, and no longer where `plugin` replaces the question.
        gpu_worker.HAS_TRITON = True
        super().__init__(vllm_config, *args, **kwargs)

    def init_device(self) -> None:
        """Prepare the process, then make the runner."""
        if not HAS_TRITON:
            prepare_process(self.vllm_config)
        if self._compiles():
            from vllm_cpu_v2.compilation import load_what_is_compiled, prepare_compiler

            prepare_compiler()
            load_what_is_compiled()
        super().init_device()

    def determine_available_memory(self) -> int:
        """Run the model for the first time, which compiles it if it is compiled at all."""
        if not self._compiles():
            return int(super().determine_available_memory())
        from vllm_cpu_v2.compilation import compiling_on_all_cores

        with compiling_on_all_cores():
            return int(super().determine_available_memory())

    def _compiles(self) -> bool:
        return self.compilation_config.mode != CompilationMode.NONE


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


def prepare_process(vllm_config: VllmConfig) -> None:
    """Give this process the kernels, collectives and layers that vLLM's CPU build lacks."""
    from vllm_cpu_v2.launch import swap_kernels

    swap_kernels()
    if vllm_config.parallel_config.data_parallel_size > 1:
        from vllm_cpu_v2.collectives import add_collectives

        add_collectives()
    if vllm_config.quant_config is not None:
        from vllm_cpu_v2 import quantized_experts

        quantized_experts.install()
    if vllm_config.lora_config is not None:
        from vllm_cpu_v2 import lora

        lora.install()
