"""vLLM's CPU platform, with what Model Runner V2 needs from a platform.

vLLM creates it if the entry point `vllm_cpu_v2.plugin.platform` names it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.platforms import cpu_platform_plugin
from vllm.utils.import_utils import resolve_obj_by_qualname

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.kernel import IrOpPriorityConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

# vLLM's CPU platform, or its variant for AMD's processors.
Base: Any = resolve_obj_by_qualname(cpu_platform_plugin())


class CpuV2Platform(Base):
    """The CPU platform for models of Model Runner V2; any other model gets vLLM's behaviour."""

    @classmethod
    def import_ir_kernels(cls) -> None:
        """Add norms in one pass to vLLM's own implementations of its operators."""
        super().import_ir_kernels()
        from vllm_cpu_v2 import norms

        norms.register()

    @classmethod
    def get_default_ir_op_priority(cls, vllm_config: VllmConfig) -> IrOpPriorityConfig:
        """Prefer these norms in eager models; a compiled model fuses vLLM's by itself."""
        from vllm_cpu_v2 import norms

        priority = super().get_default_ir_op_priority(vllm_config)
        if vllm_config.use_v2_model_runner and vllm_config.model_config.enforce_eager:
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
        if any_worker:
            parallel.worker_cls = "vllm_cpu_v2.worker.CpuV2Worker"
        from vllm_cpu_v2 import fork_server

        fork_server.offer()

    @classmethod
    def get_attn_backend_cls(
        cls,
        selected_backend: AttentionBackendEnum,
        attn_selector_config: Any,
        num_heads: int | None = None,
    ) -> str:
        """Honour ``--attention-backend CUSTOM`` if there is a Triton that can run it.

        vLLM's CPU platform replaces any backend by its own, and only logs a line.
        """
        from vllm.triton_utils import HAS_TRITON
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        if HAS_TRITON and selected_backend is AttentionBackendEnum.CUSTOM:
            return str(AttentionBackendEnum.CUSTOM.get_path())
        return str(super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads))
