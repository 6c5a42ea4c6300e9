"""vLLM's CPU platform: the choice of runner, of attention backend, and the start of a worker.

Diffusion models exist only for Model Runner V2, which vLLM offers where Triton works. On the CPU
it usually does not. There a model that needs the runner gets it, with the stand-ins of
`vllm_dllm.cpu`. Any other model keeps the runner that it would have had: the environment variable
that forces a runner is read, but never set. On another platform nothing is wrapped.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_dllm.cpu import bridge
from vllm_dllm.cpu.lora import only_adapted_rows
from vllm_dllm.vllm_patches.wrapping import with_globals, wrap

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# A name below `vllm`, because that logger has vLLM's handler and level.
logger = logging.getLogger("vllm.dllm.cpu")

_WORKER_MODULE = "vllm.v1.worker.cpu_worker"

_applied = False

# Whether a configuration is for a model that needs what vLLM lacks on the CPU.
IsBridged = Callable[["VllmConfig"], bool]


def apply(needs_runner: Callable[[VllmConfig], bool]) -> tuple[str, ...]:
    """Give this process what vLLM lacks on the CPU; a second call changes nothing.

    It must come before anything that imports vLLM's configuration, see `bridge.prepare_process`.

    Args:
        needs_runner: whether a configuration is for a model that needs Model Runner V2. It is
            called whenever vLLM reads its choice of runner, only with a configuration that has a
            model, and possibly before that configuration is complete.

    Returns:
        Short names of what was done, see `bridge.bridged_parts`.
    """
    global _applied
    if not bridge.on_cpu() or _applied:
        return bridge.bridged_parts()
    _applied = True
    bridge.prepare_process()
    if bridge.lacks_triton():

        def is_bridged(config: VllmConfig) -> bool:
            return config.model_config is not None and needs_runner(config)

        _choose_runner(is_bridged)
        _prepare_worker_in_time(is_bridged)
    else:
        _let_own_attention_through()
    parts = bridge.bridged_parts()
    if parts:
        logger.info("CPU bridge: %s", ", ".join(parts))
    return parts


def _choose_runner(is_bridged: IsBridged) -> None:
    """Let models that need Model Runner V2 choose it, and pass vLLM's check for Triton."""
    from vllm import envs
    from vllm.config import VllmConfig

    def choose_v2(original: Callable[..., bool]) -> Callable[..., bool]:
        def use_v2_model_runner(self: VllmConfig) -> bool:
            # A value in the environment is the user's decision, and vLLM's to judge.
            if envs.VLLM_USE_V2_MODEL_RUNNER is None and is_bridged(self):
                return True
            return original(self)

        return use_v2_model_runner

    def pass_check(original: Callable[..., None]) -> Callable[..., None]:
        def validate_v2_model_runner(self: VllmConfig) -> None:
            (_with_triton(original) if is_bridged(self) else original)(self)

        return validate_v2_model_runner

    wrap(VllmConfig, "use_v2_model_runner", choose_v2)
    wrap(VllmConfig, "_validate_v2_model_runner", pass_check)


def _with_triton(check: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a function that takes Triton to be available.

    All other checks of the function stay, including those of a later vLLM.
    """
    return with_globals(check, HAS_TRITON=True)


def _let_own_attention_through() -> None:
    """Let ``--attention-backend CUSTOM`` through where the CPU has a Triton that can run it.

    The CPU platform replaces any backend by its own, with no more than a log line.
    """
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    def keep_custom(original: Callable[..., str]) -> Callable[..., str]:
        def get_attn_backend_cls(
            platform: type,
            selected_backend: Any,
            attn_selector_config: Any,
            num_heads: int | None = None,
        ) -> str:
            if selected_backend is AttentionBackendEnum.CUSTOM:
                return AttentionBackendEnum.CUSTOM.get_path()
            return original(platform, selected_backend, attn_selector_config, num_heads)

        return get_attn_backend_cls

    wrap(type(current_platform), "get_attn_backend_cls", keep_custom)


def _prepare_worker_in_time(is_bridged: IsBridged) -> None:
    """See that the kernels are swapped before a CPU worker makes a Model Runner V2.

    The place for it is `CPUWorker.init_device`: it runs in the process that launches the kernels,
    with plugins loaded and the runner chosen. But importing the worker's module replaces functions
    of torch. A front-end process has no use for that, and a configuration that is still being
    imported may break on it. vLLM's worker start calls `register_triton_kernel_overrides` of the
    platform after it has loaded plugins and before it makes the worker, so `init_device` is
    wrapped in that call.
    """
    if _WORKER_MODULE in sys.modules:
        _wrap_init_device(is_bridged)
        return
    from vllm.platforms import current_platform

    platform = type(current_platform)
    if not hasattr(platform, "register_triton_kernel_overrides"):
        # This vLLM has no such call, and an early import is better than a worker without kernels.
        _wrap_init_device(is_bridged)
        return

    def then_wrap_init_device(original: Callable[..., None]) -> Callable[..., None]:
        def register_triton_kernel_overrides(platform: type) -> None:
            original(platform)
            _wrap_init_device(is_bridged)

        return register_triton_kernel_overrides

    wrap(platform, "register_triton_kernel_overrides", then_wrap_init_device)


def _wrap_init_device(is_bridged: IsBridged) -> None:
    """Prepare the process at the start of `CPUWorker.init_device` where the runner is V2."""
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    def pass_check(original: Callable[..., None]) -> Callable[..., None]:
        def init(self: Any, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
            checked = _with_triton(original) if is_bridged(vllm_config) else original
            checked(self, vllm_config, *args, **kwargs)

        return init

    if "HAS_TRITON" in Worker.__init__.__code__.co_names:
        # Newer versions check here.
        wrap(Worker, "__init__", pass_check)

    def prepare_first(original: Callable[..., Any]) -> Callable[..., Any]:
        def init_device(self: Any) -> Any:
            if self.use_v2_model_runner:
                bridge.swap_in_stand_ins()
                _pack_updated_experts()
                if self.vllm_config.quant_config is not None:
                    bridge.add_quantized_experts()
                if self.vllm_config.lora_config is not None:
                    _leave_rows_without_an_adapter_alone()
                _compile_sooner(self.vllm_config)
            return original(self)

        return init_device

    wrap(CPUWorker, "init_device", prepare_first)


def _compile_sooner(vllm_config: VllmConfig) -> None:
    """See `cpu.compilation`."""
    from vllm.config import CompilationMode
    from vllm.v1.worker.cpu.model_runner import CPUModelRunner

    from vllm_dllm.cpu.compilation import compiling_on_all_cores, prepare_compiler

    if vllm_config.compilation_config.mode != CompilationMode.NONE:
        prepare_compiler()
    wrap(CPUModelRunner, "warming_up_model", compiling_on_all_cores)


def _pack_updated_experts() -> None:
    """See `cpu.updated_experts`."""
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as method

    from vllm_dllm.cpu.updated_experts import packing_again

    wrap(method.UnquantizedFusedMoEMethod, "_setup_kernel", packing_again)


def _leave_rows_without_an_adapter_alone() -> None:
    """See `cpu.lora`. vLLM's `sgmv` operators, which the runner asks for, call these two."""
    from vllm.lora.ops.torch_ops import lora_ops

    for name in ("bgmv_expand", "bgmv_expand_slice"):
        wrap(lora_ops, name, only_adapted_rows)
