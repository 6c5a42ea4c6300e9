"""The two entry points: a platform for vLLM's CPU build, and the choice of its Model Runner V2.

Diffusion models exist only for Model Runner V2, which vLLM offers only where Triton works. On the
CPU it usually does not. There such a model gets the runner, with stand-ins for the runner's
kernels. Any other model keeps the runner that it would have had: the environment variable that
forces a runner is read, but never set. On another platform nothing changes.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# The name is below `vllm`, because that logger has vLLM's handler and level.
logger = logging.getLogger("vllm.cpu_v2")


def platform() -> str | None:
    """The class of the platform if vLLM serves from a CPU; None otherwise.

    vLLM calls it before it has a platform (entry point ``vllm.platform_plugins``).
    """
    from vllm.platforms import cpu_platform_plugin

    return "vllm_cpu_v2.platform.CpuV2Platform" if cpu_platform_plugin() else None


def register() -> None:
    """Give Model Runner V2 to models that need it (entry point ``vllm.general_plugins``).

    vLLM calls this once in each of its processes.
    """
    if "v2-runner" in parts():
        _complete_triton_placeholder()
        _offer_runner()
    if parts():
        logger.info("CPU bridge: %s", ", ".join(parts()))


def parts() -> tuple[str, ...]:
    """Short names of what vLLM's CPU build lacks in this process and is given.

    All of them are ("v2-runner", "torchvision-schemas"). The result is empty if nothing is missing,
    and on another platform.
    """
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    if not current_platform.is_cpu():
        return ()
    hook = sys.modules.get("vllm_cpu_v2.import_hook")
    runner = () if HAS_TRITON else ("v2-runner",)
    schemas = ("torchvision-schemas",) if hook is not None and hook.declared is not None else ()
    return runner + schemas


def _complete_triton_placeholder() -> None:
    """Give vLLM's placeholder for the module `triton` the helper that the runner needs."""
    from vllm.triton_utils import triton
    from vllm.utils.math_utils import next_power_of_2

    if not hasattr(triton, "next_power_of_2"):
        triton.next_power_of_2 = next_power_of_2


def _offer_runner() -> None:
    """Replace the two places where vLLM's configuration asks for Triton.

    Both become unnecessary when vLLM counts a platform's own kernels as an alternative to Triton.
    vLLM also asks while the configuration is still being made.
    """
    from vllm import envs
    from vllm.config import VllmConfig

    chosen_by_vllm = VllmConfig.use_v2_model_runner.fget
    validated_by_vllm = VllmConfig._validate_v2_model_runner

    def use_v2_model_runner(self: VllmConfig) -> bool:
        # A value in the environment is the user's decision, which vLLM validates.
        if envs.VLLM_USE_V2_MODEL_RUNNER is None and _needs_runner(self):
            return True
        return bool(chosen_by_vllm(self))

    def validate_v2_model_runner(self: VllmConfig) -> None:
        if not _needs_runner(self):
            validated_by_vllm(self)
            return
        unsupported = self._get_v2_model_runner_unsupported_features()
        if unsupported:
            raise ValueError(f"Model Runner V2 does not yet support: {', '.join(unsupported)}")

    VllmConfig.use_v2_model_runner = property(
        use_v2_model_runner, doc=VllmConfig.use_v2_model_runner.__doc__
    )
    VllmConfig._validate_v2_model_runner = validate_v2_model_runner


def _needs_runner(vllm_config: VllmConfig) -> bool:
    """Whether the model exists only for Model Runner V2."""
    return vllm_config.model_config is not None and vllm_config.model_config.is_diffusion
