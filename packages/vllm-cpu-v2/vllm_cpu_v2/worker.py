"""The CPU worker, with what Model Runner V2 launches and calls.

The platform's configuration names it, so it is imported after vLLM has loaded plugins in the
worker's process and before a runner is made.
"""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from vllm.config import CompilationMode
from vllm.triton_utils import HAS_TRITON
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_cpu_v2.launch import swap_kernels

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from vllm.config import VllmConfig


class CpuV2Worker(CPUWorker):
    """vLLM's CPU worker, for a model of Model Runner V2."""

    def init_device(self) -> None:
        """Prepare the process, then make the runner."""
        if not HAS_TRITON:
            prepare_process(self.vllm_config)
        if compiles(self.vllm_config):
            from vllm_cpu_v2.compilation import load_what_is_compiled, prepare_compiler

            prepare_compiler()
            load_what_is_compiled()
        super().init_device()

    def determine_available_memory(self) -> int:
        """Run, and so compile, the model for the first time."""
        with compiling(self.vllm_config):
            return int(super().determine_available_memory())

    def compile_or_warm_up_model(self) -> Any:
        """Compile a model that has no KV cache."""
        with compiling(self.vllm_config):
            return super().compile_or_warm_up_model()


def compiles(vllm_config: VllmConfig) -> bool:
    """Whether the model is compiled."""
    return vllm_config.compilation_config.mode != CompilationMode.NONE


def compiling(vllm_config: VllmConfig) -> AbstractContextManager[None]:
    """A context for the first run of a model, which compiles it if it is compiled at all."""
    if not compiles(vllm_config):
        return nullcontext()
    from vllm_cpu_v2.compilation import compiling_on_all_cores

    return compiling_on_all_cores()


def prepare_process(vllm_config: VllmConfig) -> None:
    """Give this process the kernels, collectives and layers that vLLM's CPU build lacks."""
    swap_kernels()
    # Imported only where they are needed.
    if vllm_config.parallel_config.data_parallel_size > 1:
        from vllm_cpu_v2.collectives import add_collectives

        add_collectives()
    if vllm_config.model_config.is_moe:
        importlib.import_module("vllm_cpu_v2.updated_experts")  # it registers itself
    if vllm_config.quant_config is not None:
        from vllm_cpu_v2 import quantized_experts

        quantized_experts.install()
    if vllm_config.lora_config is not None:
        from vllm_cpu_v2 import lora

        lora.install()
