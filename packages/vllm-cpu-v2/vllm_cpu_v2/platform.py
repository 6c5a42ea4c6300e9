"""vLLM's CPU platform, with what Model Runner V2 needs from a platform.

vLLM creates it if the entry point `vllm_cpu_v2.plugin.platform` names it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms import cpu_platform_plugin
from vllm.utils.import_utils import resolve_obj_by_qualname

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.kernel import IrOpPriorityConfig

# vLLM's CPU platform, or its variant for AMD's processors.
Base: Any = resolve_obj_by_qualname(cpu_platform_plugin())


class CpuV2Platform(Base):
    """The CPU platform for models of Model Runner V2; any other model gets vLLM's behaviour."""

    @classmethod
    def get_default_ir_op_priority(cls, vllm_config: VllmConfig) -> IrOpPriorityConfig:
        """Prefer norms in one pass in eager models; a compiled model fuses vLLM's by itself."""
        priority = super().get_default_ir_op_priority(vllm_config)
        model = vllm_config.model_config
        eager = vllm_config.use_v2_model_runner and model.enforce_eager
        if eager and model.dtype == torch.float32:
            from vllm_cpu_v2 import norms

            for name in norms.OPERATORS:
                setattr(priority, name, [norms.PROVIDER, *getattr(priority, name)])
        return priority

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Keep ``--async-scheduling``, which vLLM turns off, and choose the worker's class."""
        scheduler, parallel = vllm_config.scheduler_config, vllm_config.parallel_config
        asynchronous, any_worker = scheduler.async_scheduling, parallel.worker_cls == "auto"
        super().check_and_update_config(vllm_config)
        if vllm_config.model_config is None or not vllm_config.use_v2_model_runner:
            return
        scheduler.async_scheduling = asynchronous
        from vllm.triton_utils import HAS_TRITON  # which imports the platform

        if not HAS_TRITON:
            vllm_config.kernel_config.enable_jit_warmup = False  # it launches Triton's kernels
        if any_worker:
            parallel.worker_cls = "vllm_cpu_v2.worker.CpuV2Worker"
        from vllm.v1.engine import utils as launcher

        launcher.get_mp_context = _engine_context


def _engine_context() -> Any:
    """How vLLM starts this process's engines: from a fork server, if it can."""
    from vllm_cpu_v2.fork_server import EngineContext

    return EngineContext()
