"""Run vLLM's Model Runner V2 on a CPU, for the models that need it and for no other.

Diffusion models exist only for Model Runner V2, which vLLM offers where Triton works. On vLLM's
CPU platform Triton usually does not, so this module

- lets the configuration of a bridged model choose that runner, and pass its check;
- gives the Triton placeholder the one helper that the runner calls outside kernels;
- swaps the runner's kernels for the stand-ins of `launch` before a worker makes its runner;
- puts plain experts where a quantized checkpoint's have no kernel (`quantized_experts`);
- offers vLLM's compiled norms to its own operators (`norms`);
- declares two operator schemas without which torchvision does not import there.

An ordinary model keeps the runner it would have had: the environment variable that forces a
runner is never set, only read. Where Triton works, or on another platform, nothing is touched.

`install` runs inside the plugin's `register()`, in every process that vLLM starts.
"""

import functools
import logging
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_dllm.cpu import norms, torchvision_schemas

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# A name below `vllm`, because that logger has vLLM's handler and level.
logger = logging.getLogger("vllm.dllm.cpu")

_WORKER_MODULE = "vllm.v1.worker.cpu_worker"
# Set on whatever was wrapped, so that it is wrapped once however often `install` runs.
_MARK = "_vllm_dllm_bridged"

_installed: tuple[str, ...] | None = None


def _on_cpu() -> bool:
    """Whether this vLLM serves from the CPU."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def needed() -> bool:
    """Whether Model Runner V2 would be without its kernels: vLLM's CPU platform, no Triton."""
    if not _on_cpu():
        return False
    from vllm.triton_utils import HAS_TRITON

    return not HAS_TRITON


def bridged_parts() -> tuple[str, ...]:
    """Short words for what `install` did, or would do, in this process; changes nothing."""
    if _installed is not None:
        return _installed
    if not _on_cpu():
        return ()
    schemas = torchvision_schemas.declared() or bool(torchvision_schemas.missing())
    return _words(schemas, needed())


def _words(schemas: bool, runner: bool) -> tuple[str, ...]:
    words: list[str] = []
    if runner:
        from vllm_dllm.cpu.launch import STAND_INS

        words += ["v2-runner", f"triton-kernels:{len(STAND_INS)}"]
    if schemas:
        words.append("torchvision-schemas")
    return tuple(words)


def install(is_bridged_model: Callable[["VllmConfig"], bool]) -> tuple[str, ...]:
    """Bridge what is missing in this process; return short words for it.

    Args:
        is_bridged_model: whether a configuration is for a model that needs the bridge. It is
            asked once per read of the runner choice, only with a configuration that has a
            model, and possibly before that configuration is complete.

    Returns:
        For example ("v2-runner", "triton-kernels:13", "torchvision-schemas"); empty where
        nothing is missing. A second call changes nothing and returns the same.
    """
    global _installed
    if _installed is not None:
        return _installed
    if not _on_cpu():
        return ()
    # First, because importing vLLM's configuration imports torchvision.
    schemas = torchvision_schemas.declare()
    norms.register()  # a configuration that prefers them reaches processes that did not make it
    runner = needed()
    if runner:
        _complete_triton_placeholder()
        _wrap_runner_choice(is_bridged_model)
        _hook_worker()
    else:
        _wrap_backend_choice()
    _installed = _words(schemas, runner)
    if _installed:
        logger.info("CPU bridge: %s", ", ".join(_installed))
    return _installed


# ------------------------------------------------------------------ configuration


def _complete_triton_placeholder() -> None:
    """Give vLLM's stand-in for the `triton` module the helper that the runner asks it for."""
    from vllm.triton_utils import triton
    from vllm.triton_utils.importing import TritonPlaceholder
    from vllm.utils.math_utils import next_power_of_2

    if isinstance(triton, TritonPlaceholder) and not hasattr(triton, "next_power_of_2"):
        triton.next_power_of_2 = next_power_of_2


def _wrap_runner_choice(is_bridged_model: Callable[["VllmConfig"], bool]) -> None:
    """Make bridged models choose Model Runner V2 by themselves and pass its Triton check."""
    from vllm import envs
    from vllm.config import VllmConfig

    choice: property = VllmConfig.use_v2_model_runner
    if getattr(choice.fget, _MARK, False):
        return
    assert choice.fget is not None
    stock_choice, stock_check = choice.fget, VllmConfig._validate_v2_model_runner

    def is_bridged(config: "VllmConfig") -> bool:
        return config.model_config is not None and is_bridged_model(config)

    @functools.wraps(stock_choice)
    def use_v2_model_runner(self: "VllmConfig") -> bool:
        # A value in the environment is the user's word and stays with vLLM.
        if envs.VLLM_USE_V2_MODEL_RUNNER is None and is_bridged(self):
            return True
        return stock_choice(self)

    @functools.wraps(stock_check)
    def validate_v2_model_runner(self: "VllmConfig") -> None:
        check = _as_with_triton(stock_check) if is_bridged(self) else stock_check
        check(self)

    setattr(use_v2_model_runner, _MARK, True)
    VllmConfig.use_v2_model_runner = property(use_v2_model_runner, doc=choice.__doc__)
    VllmConfig._validate_v2_model_runner = validate_v2_model_runner


def _as_with_triton(check: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same function with a `HAS_TRITON` of its own that is true.

    Only the global that this one call sees differs, so the function's other checks stay (also
    those of a later vLLM), and no other model or thread can see a Triton that is not there.
    """
    scope = {**check.__globals__, "HAS_TRITON": True}
    return types.FunctionType(
        check.__code__, scope, check.__name__, check.__defaults__, check.__closure__
    )


def _wrap_backend_choice() -> None:
    """Let ``--attention-backend CUSTOM`` through where the CPU has a Triton that can run it.

    The CPU platform puts its own backend in the place of any other, with no more than a log line.
    """
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    platform = type(current_platform)
    stock = platform.get_attn_backend_cls
    if getattr(stock, _MARK, False):
        return

    @functools.wraps(stock)
    def get_attn_backend_cls(
        cls: type, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        if selected_backend is AttentionBackendEnum.CUSTOM:
            return AttentionBackendEnum.CUSTOM.get_path()
        return stock.__func__(cls, selected_backend, attn_selector_config, num_heads)

    setattr(get_attn_backend_cls, _MARK, True)
    platform.get_attn_backend_cls = classmethod(get_attn_backend_cls)


# ------------------------------------------------------------------------- worker


def _hook_worker() -> None:
    """See that the kernels are swapped before a CPU worker makes a Model Runner V2.

    The place is `CPUWorker.init_device`: it runs in the process that launches the kernels, with
    plugins loaded and the runner chosen. But importing the worker's module replaces functions
    of torch, for which a front-end process has no use and a configuration still being imported
    no patience. vLLM's worker start calls `register_triton_kernel_overrides` of the platform
    after loading plugins and before making the worker, so that call takes the hook there.
    """
    if _WORKER_MODULE in sys.modules:
        _wrap_init_device()
        return
    from vllm.platforms import current_platform

    platform = type(current_platform)
    stock = getattr(platform, "register_triton_kernel_overrides", None)
    if stock is None:
        # A vLLM without that call: better an early import than a worker without kernels.
        _wrap_init_device()
        return
    if getattr(stock, _MARK, False):
        return

    @functools.wraps(stock)
    def register_triton_kernel_overrides(cls: type) -> None:
        stock.__func__(cls)
        _wrap_init_device()

    setattr(register_triton_kernel_overrides, _MARK, True)
    platform.register_triton_kernel_overrides = classmethod(register_triton_kernel_overrides)


def _wrap_init_device() -> None:
    """Swap the kernels at the start of `CPUWorker.init_device` where the runner is V2."""
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    stock = CPUWorker.init_device
    if getattr(stock, _MARK, False):
        return
    if "HAS_TRITON" in Worker.__init__.__code__.co_names:
        # Newer versions ask here, too; other models that want V2 were refused before.
        Worker.__init__ = _as_with_triton(Worker.__init__)

    @functools.wraps(stock)
    def init_device(self: CPUWorker) -> Any:
        if self.use_v2_model_runner:
            from vllm_dllm.cpu.collectives import add_collectives
            from vllm_dllm.cpu.launch import swap_kernels

            swap_kernels()
            add_collectives()
            if self.vllm_config.quant_config is not None:
                from vllm_dllm.cpu import quantized_experts

                quantized_experts.install()
        return stock(self)

    setattr(init_device, _MARK, True)
    CPUWorker.init_device = init_device
